"""Packed execution on a GPU: only live rows are computed, and the host never waits to know how many there are."""
