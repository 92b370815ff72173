"""Slots of LoRA adapters, for every engine."""
