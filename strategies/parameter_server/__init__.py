"""Parameter servers: parameters that workers push gradients to and pull from, in step, nearly in step or not at all."""
