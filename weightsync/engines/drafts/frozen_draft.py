"""A draft model that updates do not change: its bytes are compared after each update."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch

from weightsync.engines.drafts.draft_model import DraftModel, own_modules, own_tensors
from weightsync.engines.loading.kernel_state import modules_beside
from weightsync.engines.loading.live_digest import TensorDigests, in_order, kind_of
from weightsync.memory.kernels.digests import tensor_digests
from weightsync.plan.layout.draft import Draft


class FrozenDraft:
    """The bytes of a draft's own tensors, as they were when this was made."""

    def __init__(self, draft: DraftModel, target: torch.nn.Module, device: torch.device) -> None:
        self._draft, self._target, self._device = draft, target, device
        self._digests = TensorDigests(device)
        self._began = self._take()

    def describe(self) -> Draft:
        """Return the description that the driver compares with other engines' drafts."""
        held = own_tensors(self._draft.model, self._target)
        listed = hashlib.sha256(repr(sorted(self._began.items())).encode())
        packed = {name: each.numel() * each.element_size() for name, each in self._packed()}
        return Draft(
            self._draft.method,
            self._draft.path,
            len(held) + len(packed),
            sum(each.numel() * each.element_size() for each in held.values()) + sum(packed.values()),
            len(_hidden(self._draft.model, self._target) - packed.keys()),
            kind_of(held.items(), self._device),
            listed.hexdigest(),
        )

    def changed(self) -> list[str]:
        """Return the names of tensors whose bytes changed.

        Tensors that the draft no longer shares with the target count as changed.
        """
        now = self._take()
        return sorted(
            name for name in now.keys() | self._began.keys() if now.get(name) != self._began.get(name)
        )

    def _take(self) -> Mapping[str, int]:
        held = own_tensors(self._draft.model, self._target)
        digests = self._digests.of([in_order(each.detach()) for each in held.values()])
        taken = dict(zip(held, digests.tolist(), strict=True))
        for name, weight in self._packed():  # one at a time, since every weight is a copy
            taken[f"{name}, as it is packed"] = int(tensor_digests([weight])[0])
        return taken

    def _packed(self) -> Iterator[tuple[str, torch.Tensor]]:
        own = {path for path, _ in own_modules(self._draft.model, self._target)}
        return ((name, weight) for name, weight in self._draft.packed() if name in own)


def _hidden(draft: torch.nn.Module, target: torch.nn.Module) -> set[str]:
    """Return the names of modules with weights that kernels hold in other memory than their parameters."""
    own = dict(own_modules(draft, target))
    empty = {path for path, each in own.items() if any(not p.numel() for p in each.parameters(recurse=False))}
    return empty | (modules_beside(draft) & own.keys())
