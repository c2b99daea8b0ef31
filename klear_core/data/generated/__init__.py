"""Generate problems: chains of operations, and puzzles with long solutions."""
