"""Starts the actors of a recipe, waits for them, and finds the actors of an earlier driver."""
