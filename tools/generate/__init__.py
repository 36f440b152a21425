"""`trainwright generate`: text from the model of a run."""
