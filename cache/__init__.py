"""fitune's store: bytes to records to tables, with neither torch nor Triton."""
