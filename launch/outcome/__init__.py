"""Outcomes of ranks, attempts and jobs."""
