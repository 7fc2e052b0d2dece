"""A server that speaks S3, in a process of its own: moto's. Debian's packages have only Ceph's,
which needs a cluster of its own, and PyPI has no other that is kept up.

As a program it prints its port, and serves until its input ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
BUCKET = "kv-blocks"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "an-access-key", "AWS_SECRET_ACCESS_KEY": "a-secret-never-logged",
    "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip


class S3Server:
    """A server with one empty bucket."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    def client(self) -> Any:
        """Return a client with all rights."""
        import botocore.session

        return botocore.session.get_session().create_client("s3", endpoint_url=self.url)

    def objects(self) -> dict[str, bytes]:
        """Return all objects in the bucket by their names."""
        client = self.client()
        listed = client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return {
            each["Key"]: client.get_object(Bucket=BUCKET, Key=each["Key"])["Body"].read()
            for each in listed
        }

    def stop(self) -> None:
        """Kill it: it refuses connections from now on."""
        self.process.kill()
        self.process.wait()


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Run a server, with credentials for it in the environment."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.kvstore.s3_server"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env=os.environ | CREDENTIALS,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            while line and not line.startswith("port "):
                line = process.stdout.readline()
            assert line, "the server did not start"
            server = S3Server(process, int(line.split()[1]))
            server.client().create_bucket(Bucket=BUCKET)
            yield server
        finally:
            process.kill()


def main() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(f"port {server.get_host_and_port()[1]}", flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
