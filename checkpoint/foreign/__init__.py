"""Import and export of checkpoint formats of other tools."""
