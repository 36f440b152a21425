"""Ranks that torchrun starts."""
