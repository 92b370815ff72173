"""LoRA adapters, and weights that they are merged into."""
