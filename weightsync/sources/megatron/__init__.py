"""Weights of Megatron-Core: tensor, pipeline and expert parallelism, in the checkpoint's names."""

from __future__ import annotations

from weightsync.sources.megatron.cuts import Cut
from weightsync.sources.megatron.families import FAMILIES, find_family
from weightsync.sources.megatron.ready import finish
from weightsync.sources.megatron.rules import Family, Rule
from weightsync.sources.megatron.source import MegatronSource
from weightsync.sources.megatron.weights import local_weights

__all__ = ["FAMILIES", "Cut", "Family", "MegatronSource", "Rule", "find_family", "finish", "local_weights"]
