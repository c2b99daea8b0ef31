"""Estimate what a run costs: tokens, memory, GPU-hours, and who waits for whom."""
