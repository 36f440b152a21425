"""Lease samples to ranks that step by themselves."""
