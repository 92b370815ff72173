"""Writes weights into an engine's model, directly or by the engine's loader."""
