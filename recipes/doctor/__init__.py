"""Checks of an environment and of a cluster."""
