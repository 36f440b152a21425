"""Composition of the axes of a layout into one strategy."""
