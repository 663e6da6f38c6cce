"""The index: the state as of the last snapshot, in LMDB."""
