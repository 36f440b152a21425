"""A differential fuzzer: programs drawn by seed, trained on one process and on layouts, and compared step by step."""
