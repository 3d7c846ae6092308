"""Is the set-up right? One check per file."""
