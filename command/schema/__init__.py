"""The typed configuration and how it is composed."""
