"""Analysis of a model: its blocks, and how each weight may be split."""
