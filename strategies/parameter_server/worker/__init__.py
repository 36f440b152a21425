"""The worker: pushes gradients and pulls parameters."""
