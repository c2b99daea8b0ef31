"""Judges math answers."""
