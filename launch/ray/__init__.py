"""`launch=ray`."""
