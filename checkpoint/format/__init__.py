"""Checkpoint format: manifest, tensor boxes and tensor files."""
