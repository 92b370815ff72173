"""Deltas: the elements of a version that differ from an earlier version's. See docs/deltas.md."""
