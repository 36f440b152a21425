"""Strategies over the data axes: one device, DDP and ZeRO."""
