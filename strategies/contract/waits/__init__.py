"""Measure how long ranks wait for each other."""
