"""Launching the ranks of a run, and recovery when one of them fails."""
