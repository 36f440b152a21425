"""Comparison with training in plain torch and with other libraries. See docs/peers.md."""
