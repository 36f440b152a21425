"""Training from a DeepSpeed JSON: read it, map each key to native configuration, and say what became of each."""
