"""Host and device memory: buffers, copies, digests."""
