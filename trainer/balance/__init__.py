"""Divide the global batch by the speed of ranks."""
