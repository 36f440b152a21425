"""Average gradients over replicas, compressed or not."""
