"""Describe one run: the page, its data, and the table on the terminal."""
