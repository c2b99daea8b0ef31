"""Store what stages make: immutable, content-addressed folders with a manifest and a ledger."""
