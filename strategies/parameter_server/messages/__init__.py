"""Messages between workers and servers."""
