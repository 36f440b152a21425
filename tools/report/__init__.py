"""What a run directory tells, as one page (`trainwright report`) and in the terminal (`trainwright watch`).

Everything here reads files of run directories and nothing else; neither torch nor Lightning is imported.
"""
