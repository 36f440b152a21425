"""Engines: start the ranks of a run on other machines than this command's."""
