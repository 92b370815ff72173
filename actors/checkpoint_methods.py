"""The part of the public API that registers checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future

import ray

from weightsync.actors.membership import Membership
from weightsync.actors.ray.loop import LoopThread
from weightsync.sources.checkpoint.checkpoint_store import Reading


class CheckpointMethods:
    """Base of `WeightSync`, which sets the attributes."""

    _loop: LoopThread
    _members: Membership

    def register_checkpoint(
        self,
        name: str,
        files: Sequence[str],
        *,
        nodes: Sequence[str] | None = None,
        exclude: Collection[str] = (),
        stored: bool = False,
        draft: Sequence[str] = (),
    ) -> Future[Reading]:
        """Start reading a checkpoint that replaces trainers. See docs/checkpoints.md.

        Returns when all headers are checked. Reading continues in the background.

        Args:
            name: the checkpoint's name in `update_weights`.
            files: safetensors files, index files, or folders with either.
            nodes: Ray's ids of the hosts that read equal shares; by default this process's host.
            exclude: names of tensors that no engine wants, or patterns such as ``visual.*``. Names of the
                draft begin with ``draft/``.
            stored: serve quantised tensors as the files store them, to engines that are quantised alike.
                Otherwise float8 weights become bfloat16.
            draft: files of a trained draft that engines speculate with. See docs/drafts.md.

        Returns:
            A future with the bytes and seconds of the reading. It raises SourceChangedError if a file has
            changed since the header was read, and so does every update of this checkpoint.

        Raises:
            ConfigError, PlanError: a file cannot be used; names the file and the tensor.
            SourceChangedError: a file changed while the header was read.
        """
        on = nodes or [ray.get_runtime_context().get_node_id()]
        registering = self._members.register_checkpoint(name, files, on, exclude, stored, draft)
        self._loop.run_concurrently(registering).result()
        return self._loop.run_concurrently(self._members.checkpoints.read(name))

    def unregister_checkpoint(self, name: str) -> None:
        """Free the memory of a checkpoint. Engines that serve it are not affected.

        Raises:
            ConfigError: no checkpoint has this name.
        """
        self._loop.submit(lambda: self._members.unregister_checkpoint(name)).result()
