"""Which layout of a cluster trains a module fastest, told before anything is started."""
