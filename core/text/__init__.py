"""Bounded, printable and authenticated text from untrusted sources."""
