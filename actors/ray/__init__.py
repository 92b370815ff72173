"""Calls to Ray actors, and their life."""
