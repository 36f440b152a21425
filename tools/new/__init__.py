"""`trainwright new`: create a project."""
