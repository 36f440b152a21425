"""The format of a checkpoint: its manifest, its boxes and its files of tensors."""
