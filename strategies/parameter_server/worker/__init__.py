"""Worker: pushes gradients and pulls parameters."""
