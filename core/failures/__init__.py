"""How a rank failed: recorded, explained in one paragraph, reported."""
