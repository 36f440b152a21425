"""Dependency tracing of the first pipeline step, and replay of what stages need from each other."""
