"""Ports for servers that take a while to bind theirs."""

import random
import socket


def free_port() -> int:
    """Below the range from which Linux gives ports away (32768 and up), so that nobody gets it meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
