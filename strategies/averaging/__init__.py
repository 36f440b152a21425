"""Gradient averaging over replicas, with optional compression."""
