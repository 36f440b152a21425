"""Keep NaN, spikes and silent corruption out of the weights."""
