"""The part of the public API that registers checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

import ray

from weightsync.actors.checkpoints.followed_store import FollowedStore
from weightsync.actors.membership import Membership
from weightsync.actors.ray.loop import LoopThread
from weightsync.driver.updating.controller import Controller
from weightsync.errors import ConfigError, SourceChangedError
from weightsync.sources.checkpoint.checkpoint_store import Reading


class CheckpointMethods:
    """Base of `WeightSync`, which sets the attributes."""

    _loop: LoopThread
    _controller: Controller
    _members: Membership
    _stores: dict[str, FollowedStore]

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

    def register_store(
        self,
        url: str,
        *,
        name: str = "store",
        folder: str | Path | None = None,
        exclude: Collection[str] = (),
        stored: bool = False,
    ) -> Future[Reading]:
        """Register the newest version of a store as a checkpoint. See docs/stores.md.

        Returns when the version is in `folder`. ``update_weights(checkpoint=name)`` then downloads the newest
        version, if it is another one, and moves it. Its checkpoint is called such as ``store@7``.

        Args:
            url: the store, such as ``s3://bucket/policy`` or ``file:///mnt/policy``.
            name: the store's name in `update_weights` and `unregister_checkpoint`.
            folder: the folder on this host that follows the store, such as ``/dev/shm/policy``; by default
                one in the user's cache.
            exclude, stored: as of `register_checkpoint`.

        Raises:
            ConfigError: the URL or the folder cannot be used, or the name is taken.
            StoreError: the store has no version, or an object is missing or damaged.
            WeightSyncError: as `register_checkpoint`.
        """
        if name in (taken := {*self._stores, *self._members.checkpoints.names}):
            raise ConfigError("name", name, f"choose a name other than {', '.join(sorted(taken))}")
        store = FollowedStore(name, url, folder, exclude, stored)
        reading = self._follow(store)
        self._stores[name] = store
        return reading

    def _follow(self, store: FollowedStore) -> Future[Reading]:
        """Register the newest version of a store, in place of the version before."""
        checkpoint, files = store.follow()
        if files == store.files:
            return self._loop.run_concurrently(self._members.checkpoints.read(checkpoint))
        before = store.checkpoint
        if before == checkpoint:  # the store was published again, or a file was changed
            self.unregister_checkpoint(before)
            store.checkpoint, store.files = "", None  # if the new files are refused, none are registered
        reading = self.register_checkpoint(
            checkpoint, [str(files)], exclude=store.exclude, stored=store.stored
        )
        try:
            store.require_unchanged(files)  # the readers have noted the files' times by now
        except SourceChangedError:
            self.unregister_checkpoint(checkpoint)
            raise
        store.checkpoint, store.files = checkpoint, files
        if before not in ("", checkpoint):
            self.unregister_checkpoint(before)
        return reading

    async def _choose(self, checkpoint: str) -> None:
        """Choose the checkpoint of the next update, and wait until it is read.

        Raises ConfigError if trainers are registered and a checkpoint is named, or neither.
        """
        if self._controller.plan is None:
            return  # connect() has to come first
        if self._members.trainers and checkpoint:
            raise ConfigError("checkpoint", checkpoint, "leave it out: trainers are registered, and publish")
        if not self._members.trainers:
            await self._members.checkpoints.read(checkpoint)
            self._members.checkpoints.published = checkpoint

    def unregister_checkpoint(self, name: str) -> None:
        """Free the memory of a checkpoint, or of a store's. Engines that serve it are not affected.

        Raises:
            ConfigError: no checkpoint or store has this name.
        """
        if store := self._stores.pop(name, None):
            name = store.checkpoint

        async def unregister() -> None:
            await self._controller.snapshot_index.copied()  # holders copy snapshots from it
            await self._members.checkpoints.unregister(name)

        self._loop.submit(unregister).result()
