"""Reading of DeepSpeed ZeRO checkpoints."""
