"""End a run that is told to end, with its state saved."""
