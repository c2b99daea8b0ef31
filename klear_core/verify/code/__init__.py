"""Judges programs."""
