"""Source files that run inside the jail, under the sandbox's own interpreter (3.9 or newer), standard library only."""
