"""Weights that DeepSpeed's ZeRO has cut."""
