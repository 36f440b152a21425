"""The base class of all strategies, and what it shows user code."""
