"""Calls that one process of a host forwards for the others."""
