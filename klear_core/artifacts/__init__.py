"""Artifacts: immutable, content-addressed folders with a manifest and a ledger, and the files inside them."""
