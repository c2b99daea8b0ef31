"""Show the results of a run to people: one HTML file and one terminal table."""
