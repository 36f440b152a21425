"""Run on the devices of this machine."""
