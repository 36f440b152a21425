"""Go on after a failure: restart, replace, shrink, resume."""
