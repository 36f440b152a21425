"""How a training step runs on many devices: one file per strategy."""
