"""Text and bytes from others: bounded, printable, authenticated."""
