"""The command `trainwright`."""
