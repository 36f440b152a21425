"""A run: its directory, its phases, its hooks and how it is interrupted."""
