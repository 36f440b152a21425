"""One script per peer and layout, as its own documentation shows it. Lines that end in ``# bench`` are not counted."""
