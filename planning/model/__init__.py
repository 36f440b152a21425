"""Measure what one pass of a module costs."""
