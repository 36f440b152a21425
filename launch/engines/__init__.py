"""Engines, which start the ranks of a run on other machines."""
