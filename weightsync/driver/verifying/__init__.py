"""Compares digests."""
