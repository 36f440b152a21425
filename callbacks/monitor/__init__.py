"""Monitoring of cost and time, one callback per concern, and of records that they emit."""
