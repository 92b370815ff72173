"""Starts the actors of a recipe, waits for them, and finds those of an earlier driver."""
