"""Time that ranks wait for each other."""
