"""A configuration: its values, its references, its targets and its secrets."""
