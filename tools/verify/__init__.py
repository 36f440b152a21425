"""The verb `verify`: compare training under a layout with training in one process."""
