"""Composition of the typed configuration."""
