"""Recipes on tables."""
