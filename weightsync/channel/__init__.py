"""Channels between processes: the driver's calls, an engine rank's buckets, a trainer rank's pushes."""
