"""Data modules of text."""
