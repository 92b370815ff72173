"""The driver's part: it plans, schedules updates, and heals engines."""
