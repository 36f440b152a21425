"""Processes of this machine: kernel state, signals and shutdown."""
