"""Launches that are recorded as a CUDA graph and started by one call."""

from __future__ import annotations

from collections.abc import Callable

import torch


class LaunchGraph:
    """Launches on the current device. Tables and kernels must be loaded, and memory allocated.

    To start dozens of kernels one by one would take longer than the kernels.
    """

    def __init__(self, launch: Callable[[torch.cuda.Stream], None]) -> None:
        """Record the kernels that `launch` starts on the given stream."""
        self._graph, self._launch = torch.cuda.CUDAGraph(), launch  # `launch` keeps the tables alive
        stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            # Other threads may use the device while this one records.
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch(stream)
            finally:
                self._graph.capture_end()

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Start all launches on `stream`, in order."""
        with torch.cuda.stream(stream):
            self._graph.replay()
