"""Compute intervals, tests and power of scores."""
