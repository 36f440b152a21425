"""Show a plan."""
