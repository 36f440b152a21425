"""Optimizer steps on parameters shared by several ranks."""
