"""Compare models, runs and published results, and decide on promotion."""
