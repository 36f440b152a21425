"""Snapshots of run states in the memory of ranks."""
