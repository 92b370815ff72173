"""Between a holder and its engine rank: bytes in shared memory, words on a socket."""
