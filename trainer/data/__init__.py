"""The order of samples, and who reads which."""
