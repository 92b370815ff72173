"""Shuffles and tensor streams, of use without the rest."""
