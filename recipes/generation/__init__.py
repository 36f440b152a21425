"""Text that a causal language model continues, on any layout."""
