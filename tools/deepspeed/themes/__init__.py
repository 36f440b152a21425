"""Translation of DeepSpeed's keys by theme."""
