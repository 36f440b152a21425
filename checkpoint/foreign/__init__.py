"""Checkpoints of other tools: import and export."""
