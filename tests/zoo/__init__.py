"""The zoo: modules of the kind people write, the layouts each is tried on, and what must come of it."""
