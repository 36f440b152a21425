"""Foundations of all strategies: process groups, gradients, precision, collectives."""
