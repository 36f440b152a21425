"""Failures of ranks: recording, classification and reporting."""
