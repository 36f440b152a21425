"""Finds ranks that live but do not get on, and says which one keeps the others waiting, and why."""
