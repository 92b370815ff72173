"""Decides when lost processes are restored, and restores them."""
