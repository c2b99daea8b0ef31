"""Describe the pipeline as data: its stages, what a run would do, what it would cost, and what would stop it."""
