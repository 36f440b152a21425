"""Proofs that a module computes the same when it is split, by trying it on a copy."""
