"""The verb `generate`."""
