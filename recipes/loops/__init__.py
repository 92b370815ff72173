"""Loops and scripts that one runs, top to bottom, and their steps."""
