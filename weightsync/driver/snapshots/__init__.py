"""Copies of versions, and the choice of the copy that fills an engine."""
