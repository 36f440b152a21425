"""Tensor, sequence and loss parallelism."""
