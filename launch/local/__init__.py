"""Runs on the devices of this machine."""
