"""Predict the memory of a rank."""
