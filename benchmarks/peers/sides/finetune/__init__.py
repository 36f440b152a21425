"""The sides of ``python -m benchmarks.finetune``."""
