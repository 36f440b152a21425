"""What ranks that share a model split, gather, reduce and publish."""
