"""The driver: plans, runs updates, and heals engines."""
