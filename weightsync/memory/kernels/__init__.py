"""Copies and digests, on CPUs and on GPUs."""
