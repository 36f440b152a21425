"""From what a rank holds to a checkpoint, and back."""
