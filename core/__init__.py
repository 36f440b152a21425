"""Vocabulary that every other package shares: layouts, problems, texts, processes; it imports none of them."""
