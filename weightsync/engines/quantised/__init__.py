"""Quantised models, for every engine."""
