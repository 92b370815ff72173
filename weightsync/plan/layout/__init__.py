"""Which boxes of which tensors a process holds."""
