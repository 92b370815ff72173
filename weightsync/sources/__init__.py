"""Trainer adapters. README.md explains how to add one."""

from __future__ import annotations

from weightsync.sources.base import Source

__all__ = ["Source"]
