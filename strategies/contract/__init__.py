"""What every strategy builds on: groups, gradients, precision, collectives."""
