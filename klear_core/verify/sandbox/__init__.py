"""Run untrusted programs in a jail that has proven its isolation."""
