"""Runs an update, and refills engines."""
