"""Sending less than the numbers themselves: codecs, and what averages gradients by them."""
