"""HTML pages with charts for `trainwright report` and `trainwright plan --html`; without torch."""
