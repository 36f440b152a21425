"""The `hf_causal_lm` recipe."""
