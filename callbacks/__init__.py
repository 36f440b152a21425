"""Who watches a run: loss, speed, progress and summary. They read any strategy through its public properties only."""
