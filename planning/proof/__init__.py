"""Build planned ranks at full size, without memory."""
