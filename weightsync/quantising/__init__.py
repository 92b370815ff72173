"""Quantises weights to engines' formats."""
