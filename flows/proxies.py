"""Exempt this machine's own servers from HTTP proxies."""

from __future__ import annotations

import os


def bypass_proxies_for_loopback() -> None:
    """Add loopback addresses to NO_PROXY: a proxy would look for these servers on its own machine."""
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = dict.fromkeys([*filter(None, listed.split(",")), "127.0.0.1", "localhost"])
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)  # programs read one or the other
