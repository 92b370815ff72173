"""Quantises weights to the bytes of engines' formats."""
