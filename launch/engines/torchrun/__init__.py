"""Ranks started by torchrun."""
