"""Text generation with any causal language model, on any layout."""
