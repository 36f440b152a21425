"""Learn from the first step of a pipeline what its stages send each other."""
