"""Conversion between a rank's shards and checkpoints."""
