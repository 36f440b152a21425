"""Who starts the ranks of a run: this process alone, torch's elastic agent, or a launcher outside."""
