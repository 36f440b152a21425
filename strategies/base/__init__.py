"""Base class of all strategies, and its views of the module for user code."""
