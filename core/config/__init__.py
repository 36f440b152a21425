"""Configuration values, references, targets and secrets."""
