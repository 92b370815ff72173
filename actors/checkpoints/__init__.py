"""Checkpoint folders as sources of weights."""
