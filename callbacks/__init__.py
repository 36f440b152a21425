"""Callbacks. They access any strategy through its public properties only."""
