"""What we are measured against: training written by hand in plain torch, and by other libraries. See docs/peers.md."""
