"""Find and open checkpoints."""
