"""The `moe` recipe."""
