"""Search for layouts that a module and a cluster allow."""
