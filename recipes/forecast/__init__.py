"""What an update would move, without a cluster."""
