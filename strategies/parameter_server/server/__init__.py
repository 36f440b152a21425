"""Server: holds parameters and steps them."""
