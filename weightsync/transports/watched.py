"""The part that all transports share: a rendezvous, and a watch over operations."""

from __future__ import annotations

from weightsync.config import TlsFiles
from weightsync.transports.store import NetworkStore, StoreServer
from weightsync.transports.watchdog import Watch


class WatchedTransport:
    """Base class of transports. A subclass sets the fields in `offer` and `open`."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        """`tls`: this process's files, if the rendezvous speaks TLS. Bytes are moved without TLS."""
        self._tls = tls
        self._server: StoreServer | None = None
        self._store: NetworkStore | None = None
        self._opened: Watch | None = None
        self._rank, self._num_ranks = -1, 0

    @property
    def _watch(self) -> Watch:
        assert self._opened, "open the transport first"
        return self._opened

    def set_timeout(self, timeout_s: float) -> None:
        """Give operations `timeout_s` from now on, as `Transport.set_timeout` says."""
        self._watch.set_timeout(timeout_s)

    def abort(self, cause: str) -> None:
        """Give up the communicator, as `Transport.abort` says."""
        if self._opened:
            self._opened.end(cause)

    def close(self) -> None:
        """Leave the communicator, and close the store."""
        if self._opened:
            self._opened.close()
        for each in (self._store, self._server):
            if each:
                each.close()
