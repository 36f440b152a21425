"""Predict the seconds of an optimizer step."""
