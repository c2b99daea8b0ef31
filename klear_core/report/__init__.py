"""The evidence of a run, for people: one HTML file and one terminal table."""
