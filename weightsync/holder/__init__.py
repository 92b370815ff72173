"""The holder: one process per GPU or slot, which moves the bytes."""
