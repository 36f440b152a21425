"""Kills runs at a thousand instants and looks at what they leave; ``python -m benchmarks.soak``."""
