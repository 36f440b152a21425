"""Collectives: of flat tensors, differentiable, and of what user code asks for."""
