"""Whole parameters and gradients for user code, where ranks hold parts of them."""
