"""Search the layouts that a module and a cluster allow."""
