"""Requests, versions and processes of an engine."""
