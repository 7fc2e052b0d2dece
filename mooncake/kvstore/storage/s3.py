"""Adapter: the `ObjectStore` of a bucket over S3, with botocore, AWS's own client. This is the only
module that imports it, and only a node with a bucket imports this module.

Credentials, region and trusted certificates are found as in every program that uses AWS's client:
variables, files of the user, the role of the machine or the pod.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from urllib3.exceptions import HTTPError

from mooncake.base import ConfigError
from mooncake.kvstore.config import ObjectStoreConfig
from mooncake.kvstore.storage.bucket import StoreError

CONNECT_S = 2.0
WRITE_S = 10.0
CHUNK_BYTES = 1 << 20
_ABSENT = frozenset({"NoSuchKey", "404"})


class S3Store:
    """See `ObjectStore`."""

    def __init__(
        self,
        config: ObjectStoreConfig,
        num_threads: int,
        read_s: float,
        write_s: float = WRITE_S,
    ) -> None:
        """`read_s`: a read that takes longer is given up. `write_s`: the longest wait for the
        server while it takes a block, or lists names.

        Raises:
            ConfigError: there is no client for these settings.
        """
        self._bucket = config.bucket
        self._read_s = read_s
        session = botocore.session.get_session()

        def client(connect_s: float, wait_s: float) -> Any:
            return session.create_client(
                "s3",
                endpoint_url=config.endpoint,
                config=Config(
                    connect_timeout=connect_s,
                    read_timeout=wait_s,
                    max_pool_connections=num_threads,
                    retries={"total_max_attempts": 1},
                    # Blocks carry their own checksums; many servers know only the older ones.
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                ),
            )

        try:
            self._reader = client(CONNECT_S, read_s)
            # urllib3 sends a whole request within the time that it has to connect.
            self._writer = client(write_s, write_s)
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(f"kvstore.object_store: {error}") from error

    def put(self, name: str, data: bytearray) -> None:
        self._call(self._writer.put_object, Key=name, Body=bytes(data))

    def get(self, name: str, out: memoryview) -> int | None:
        give_up_s = time.monotonic() + self._read_s
        try:
            body = self._call(self._reader.get_object, Key=name)["Body"]
        except StoreError as error:
            if _code(error.__cause__) in _ABSENT:
                return None
            raise
        size = 0
        try:
            while size < len(out) and (piece := body.read(min(CHUNK_BYTES, len(out) - size))):
                out[size : size + len(piece)] = piece
                size += len(piece)
                if time.monotonic() > give_up_s:
                    raise StoreError(f"{name} did not come within {self._read_s:g} s")
        except (BotoCoreError, HTTPClientError, HTTPError, OSError) as error:
            raise StoreError(str(error)) from error
        finally:
            body.close()
        return size

    def delete(self, name: str) -> None:
        self._call(self._writer.delete_object, Key=name)

    def names(self, prefix: str) -> Iterator[str]:
        more: dict[str, str] = {}
        while True:
            page = self._call(self._writer.list_objects_v2, Prefix=prefix, **more)
            yield from (each["Key"] for each in page.get("Contents", ()))
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _call(self, method: Any, **arguments: Any) -> Any:
        try:
            return method(Bucket=self._bucket, **arguments)
        except (BotoCoreError, ClientError, HTTPClientError, HTTPError, OSError) as error:
            raise StoreError(str(error)) from error


def _code(error: BaseException | None) -> str:
    """Return the code of a server's refusal, or nothing."""
    return str(error.response["Error"].get("Code", "")) if isinstance(error, ClientError) else ""
