"""Sharding, gathering, reduction and publication of parameters."""
