"""Data: files → systems → data set → order of micro-batches → batches."""
