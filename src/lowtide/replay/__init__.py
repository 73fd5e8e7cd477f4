"""Calls on a GPU repeated from a record: see `replayed`."""
