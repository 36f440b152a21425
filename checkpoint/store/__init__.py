"""Folders of checkpoints on this machine and in stores that fsspec knows."""
