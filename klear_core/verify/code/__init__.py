"""Judge programs by running them on tests."""
