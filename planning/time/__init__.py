"""Predicted seconds of an optimizer step."""
