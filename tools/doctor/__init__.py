"""The verbs `doctor` and `profile`: check the machines of a run before it starts, and measure devices and links.

Each machine collects facts (``*_facts``); the ``judge_*`` functions take nothing but facts, so tests can judge any
machine from a description. Findings are sent to rank 0, which adds what ranks measured of each other.
"""
