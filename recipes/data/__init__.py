"""Text as data modules."""
