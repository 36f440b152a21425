"""The parts of which a strategy of any layout is put together."""
