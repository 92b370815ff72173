"""Stores: versions of a checkpoint in a bucket or a shared folder. See docs/stores.md."""
