"""Parameter servers that workers push gradients to and pull from: synchronous, bounded-staleness or asynchronous."""
