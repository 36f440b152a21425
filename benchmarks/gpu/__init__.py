"""What has run on a GPU: ``python -m benchmarks.gpu``, or ``make gpu``."""
