"""The verb `checkpoint`."""
