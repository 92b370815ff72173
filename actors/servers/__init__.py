"""Servers and trainers that Ray did not start: they dial in, and take part as engines and ranks."""
