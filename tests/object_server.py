"""A local server of the S3 protocol, as the environment of this process and of those that it starts names it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

SECRET = "the-secret-key"


@contextmanager
def object_server(bucket: str, ip_address: str = "127.0.0.1") -> Iterator[str]:
    """Start it with an empty bucket, on one of this machine's addresses; yields its address."""
    moto_server = pytest.importorskip("moto.server", reason="needs moto[server], of the extra `dev`")
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs, of the extra `s3`")
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    running = moto_server.ThreadedMotoServer(ip_address=ip_address, port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    # servers of one process share their objects
    httpx.post(f"http://{host}:{port}/moto-api/reset").raise_for_status()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "klear",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    patch = pytest.MonkeyPatch()
    for name, value in settings.items():
        patch.setenv(name, value)
    try:
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir(bucket)
        yield f"{host}:{port}"
    finally:
        patch.undo()
        running.stop()
        s3fs.S3FileSystem.clear_instance_cache()
