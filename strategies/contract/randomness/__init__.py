"""Random number generators that agree, or differ, across ranks."""
