"""Measure what ranks send and how long they wait."""
