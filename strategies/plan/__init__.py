"""Find out what a model allows: its blocks, and how each weight may be split."""
