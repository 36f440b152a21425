"""Processes of this machine: what the kernel knows of them, and how they end together."""
