"""Write a checkpoint: all ranks together, whole or not at all."""
