"""What we are measured against: training written by hand in plain torch, and in Lightning."""
