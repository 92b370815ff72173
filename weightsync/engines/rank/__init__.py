"""One rank of an engine, and the rank's process."""
