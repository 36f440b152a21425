"""Run directories as an HTML page (`trainwright report`) and in the terminal (`trainwright watch`).

Only files of run directories are read; neither torch nor Lightning is imported.
"""
