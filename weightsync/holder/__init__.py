"""A holder's part: one process per GPU or slot, which moves the bytes."""
