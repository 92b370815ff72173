"""Plans of messages between hosts, and of shuffles."""
