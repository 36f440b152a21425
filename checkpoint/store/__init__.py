"""Storage of checkpoint folders, local and in fsspec stores."""
