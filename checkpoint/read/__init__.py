"""Finding and opening of checkpoints."""
