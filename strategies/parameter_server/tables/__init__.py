"""Embedding tables on servers."""
