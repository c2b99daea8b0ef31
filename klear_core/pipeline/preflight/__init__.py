"""Find what would stop a run, before anything is spent."""
