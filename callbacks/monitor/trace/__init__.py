"""Traces of torch's profiler."""
