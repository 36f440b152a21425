"""A run: its directory, phases, hooks and interruption."""
