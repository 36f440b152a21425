"""Check, before the first optimizer step, that a layout computes the same as the module as written."""
