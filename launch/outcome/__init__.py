"""How ranks end."""
