"""One rank of an engine, and its process."""
