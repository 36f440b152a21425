"""Recovery after a failure: restart, replace, shrink, resume."""
