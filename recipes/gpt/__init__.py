"""The `gpt` recipe."""
