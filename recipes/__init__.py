"""Runnable loops, their YAML and the command line."""
