"""Save the run state while training."""
