"""Whole parameters and gradients for user code, while ranks hold shards."""
