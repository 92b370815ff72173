"""Writes weights into an engine's model, or has its loader do so."""
