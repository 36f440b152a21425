"""`trainwright checkpoint`."""
