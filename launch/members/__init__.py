"""Runs whose replicas come and go."""
