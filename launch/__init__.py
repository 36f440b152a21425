"""Who starts the ranks of a run, and what is done when one of them fails."""
