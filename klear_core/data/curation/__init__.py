"""Curate sources of any size: read blocks in parallel, merge the results, write the problems. Each step can resume."""
