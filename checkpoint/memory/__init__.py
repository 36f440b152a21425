"""States in the memory of ranks."""
