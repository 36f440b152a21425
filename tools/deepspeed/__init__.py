"""Translation of a DeepSpeed JSON to native configuration."""
