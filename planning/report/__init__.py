"""Output of a plan."""
