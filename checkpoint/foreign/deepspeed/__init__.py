"""Checkpoints of DeepSpeed's ZeRO."""
