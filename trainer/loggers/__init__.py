"""Loggers that survive restarts and full disks."""
