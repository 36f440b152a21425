"""Report a hang: who keeps the others waiting, and why."""
