"""Connects trainers, holders and engines, and plans the traffic between them."""
