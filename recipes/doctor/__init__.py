"""What an environment or a cluster can run."""
