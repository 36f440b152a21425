"""Preemption: a run is asked to stop, and saves its state first."""
