"""Proof, before the first optimizer step, that a layout computes what the module as written computes."""
