"""Draft models, for every engine."""
