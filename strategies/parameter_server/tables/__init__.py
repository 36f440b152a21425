"""Tables of embeddings on servers."""
