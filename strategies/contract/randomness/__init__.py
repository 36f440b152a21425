"""Random numbers that agree, or differ, between ranks."""
