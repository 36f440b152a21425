"""Tables of DeepSpeed's keys by theme."""
