"""Inference servers that Ray did not start: they dial in, and take part as engines."""
