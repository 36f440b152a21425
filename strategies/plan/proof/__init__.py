"""Proofs that a split module computes the same, by running a copy."""
