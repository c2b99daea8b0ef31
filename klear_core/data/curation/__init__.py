"""Curate sources of any size: read blocks in parallel, merge what was found, write the result; killed, it resumes."""
