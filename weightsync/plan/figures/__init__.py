"""Estimates of bytes and times."""
