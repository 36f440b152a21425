"""Report of a hang and its cause."""
