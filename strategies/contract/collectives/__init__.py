"""Collectives: of flat tensors, differentiable ones, and those called by user code."""
