"""What a run sends: counted by rank, mesh axis and kind of collective."""
