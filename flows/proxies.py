"""Proxies, and the servers that are not to be sought behind them."""

from __future__ import annotations

import os


def spare_own_machine() -> None:
    """Ask no proxy for this machine's own servers, whatever HTTP_PROXY says: it would look for them on its own machine."""
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = dict.fromkeys([*filter(None, listed.split(",")), "127.0.0.1", "localhost"])
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)  # some programs read the one, some the other
