"""Writing of checkpoints by all ranks together, atomically."""
