"""What travels between processes: peers, messages, handles, times."""
