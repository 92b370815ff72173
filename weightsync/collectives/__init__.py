"""Shuffles and tensor streams, which can be used without the rest of the library."""
