"""Launches that are recorded once as a CUDA graph, and then started together by one call."""

from __future__ import annotations

from collections.abc import Callable

import torch


class LaunchGraph:
    """Launches on the current device. Their tables and kernels are loaded, and no memory is allocated.

    Starting dozens of kernels one by one takes longer than they do.
    """

    def __init__(self, launch: Callable[[torch.cuda.Stream], None]) -> None:
        """Record what `launch` starts on the stream that it is given."""
        self._graph, self._launch = torch.cuda.CUDAGraph(), launch  # which holds the tables
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            # Other threads may use the device while this one records.
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch(stream)
            finally:
                self._graph.capture_end()

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Start all of them on `stream`, in order."""
        with torch.cuda.stream(stream):
            self._graph.replay()
