"""Measured costs of one pass of a module."""
