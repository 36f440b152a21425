"""Communication of a run: counted by rank, mesh axis and kind of collective, and predicted."""
