"""Calls between processes: a process dials its driver, and answers calls on that connection."""
