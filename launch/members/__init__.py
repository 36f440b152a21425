"""Elastic data parallelism: runs whose replicas come and go."""
