"""Channels between processes: the driver's calls, and an engine rank's buckets."""
