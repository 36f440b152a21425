"""Checkpoints: written by all ranks together, published at once, verified before use."""
