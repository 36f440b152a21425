"""Predicted memory of a rank."""
