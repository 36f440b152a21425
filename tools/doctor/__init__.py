"""`trainwright doctor`: what is wrong with the machines of a run, before it starts; and `trainwright profile`.

Each machine collects plain facts (``*_facts``) and judges them by functions that take nothing but facts, so that tests
can judge any machine from a description of it. Findings travel to rank 0, which adds what ranks measured together.
"""
