"""The server: holds parameters and steps them."""
