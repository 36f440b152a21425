"""Planner: predict memory and step time of all layouts of a module, and rank them."""
