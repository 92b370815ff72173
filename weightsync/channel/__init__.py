"""The channel between a holder and its engine rank: shared memory and a socket."""
