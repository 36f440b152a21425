"""Parts of the hybrid strategy."""
