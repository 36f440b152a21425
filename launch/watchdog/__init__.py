"""Detection of ranks that hang, and of the cause."""
