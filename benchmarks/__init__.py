"""One runnable module per claim, its peers measured in the same run: ``python -m benchmarks.overhead --help``."""
