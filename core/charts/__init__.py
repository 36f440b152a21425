"""Pages of HTML with pictures, for `trainwright report` and `trainwright plan --html`; torch is not imported."""
