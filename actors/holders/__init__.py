"""Holder actors: where they run, and which processes they are."""
