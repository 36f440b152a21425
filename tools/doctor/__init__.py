"""`trainwright doctor`: what is wrong with the machines of a run, before it starts; and `trainwright profile`.

What is looked at is collected as plain facts (``*_facts``), and judged by functions that take nothing but facts, so
that any machine can be judged from a description of it.
"""
