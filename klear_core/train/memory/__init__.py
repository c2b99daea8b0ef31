"""Measure what a learner rank allocates, on fake tensors: no GPU, no weights, seconds for an 8B model."""
