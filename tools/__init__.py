"""Tools that the command loads on demand."""
