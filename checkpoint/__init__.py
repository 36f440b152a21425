"""What a run leaves on disk and finds again: written by all ranks together, published at once, verified before use."""
