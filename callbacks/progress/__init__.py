"""Show how a run progresses: loss, speed, progress bar, summaries."""
