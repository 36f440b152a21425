"""Recipes on images."""
