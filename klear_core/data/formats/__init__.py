"""Read published row formats: problems, references, tests and traces."""
