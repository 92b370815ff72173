"""Values and calls that pass between processes: peers, messages, handles, times."""
