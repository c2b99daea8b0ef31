"""Families of generated problems with long solutions: nested brackets, residues by search, and small programs."""
