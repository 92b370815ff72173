"""The output head of a tied model whose files have the embedding twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from weightsync.sources.checkpoint.stored_files import StoredPlace, read_json

_HEAD = "lm_head.weight"
_CHUNK_NBYTES = 4 << 20


def repeated_heads(found: Mapping[str, StoredPlace]) -> Iterator[tuple[str, str]]:
    """Yield (head, embedding) where ``config.json`` ties both, and the files have the same bytes for both.

    Loaders of tied models pass over such a head. One with other bytes is not found here.
    """
    for name, head in found.items():
        if name.endswith(_HEAD) and _is_tied(head.file.path.parent / "config.json"):
            for other, place in found.items():
                if other != name and _are_equal(head, place):
                    yield name, other
                    break


def _is_tied(path: Path) -> bool:
    config = read_json(path) if path.exists() else {}
    return any(each.get("tie_word_embeddings") is True for each in (config, config.get("text_config") or {}))


def _are_equal(head: StoredPlace, other: StoredPlace) -> bool:
    import torch

    if (head.meta.shape, head.meta.dtype) != (other.meta.shape, other.meta.dtype):
        return False
    numel, most = head.meta.numel, _CHUNK_NBYTES // head.meta.itemsize
    for first in range(0, numel, most):
        count = min(most, numel - first)
        ours, theirs = (place.read(first, count).view(torch.uint8) for place in (head, other))
        if not torch.equal(ours, theirs):
            return False
    return True
