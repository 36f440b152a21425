"""`trainwright verify`: compare a layout with one process."""
