"""Checks of a configuration before any process starts."""
