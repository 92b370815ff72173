"""What other frameworks import, each module its own; nothing of ours imports them, and they are all edge."""
