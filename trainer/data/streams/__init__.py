"""Streams of samples: dealt to ranks one by one, or shard by shard."""
