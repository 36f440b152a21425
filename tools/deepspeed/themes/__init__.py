"""What becomes of the keys of a DeepSpeed JSON, theme by theme."""
