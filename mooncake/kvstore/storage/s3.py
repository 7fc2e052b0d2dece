"""Adapter: the `ObjectStore` of a bucket over S3, with botocore, AWS's own client. This is the only
module that imports it, and only a node with a bucket imports this module.

Credentials, region and trusted certificates are found as in every program that uses AWS's client:
variables, files of the user, the role of the machine or the pod.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import botocore
import botocore.session
from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from urllib3.exceptions import HTTPError

from mooncake.base import ConfigError
from mooncake.kvstore.config import ObjectStoreConfig
from mooncake.kvstore.storage.bucket import StoreError

CONNECT_S = 2.0
WRITE_S = 10.0
CHUNK_BYTES = 1 << 20
_log = logging.getLogger(__name__)
_ABSENT = frozenset({"NoSuchKey", "404"})


class _Bytes(io.RawIOBase):
    """What a server answers, up to the end of the time that its socket has for one read.
    Otherwise a server that sends a byte now and then would hold a thread for as long as it likes.
    """

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._until_s = time.monotonic() + sock.gettimeout()

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return what an `HTTPResponse` takes from its socket."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int | None:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the answer did not come in time")
        self._sock.settimeout(left_s)
        num_bytes: int | None = self._raw.readinto(out)
        return num_bytes

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **words: Any) -> None:
        super().__init__(_Bytes(sock), *args, **words)  # type: ignore[arg-type]


class _Connection(AWSHTTPConnection):  # type: ignore[misc]
    response_class = _Response


class _Connections(AWSHTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _Connection


class _TlsConnection(AWSHTTPSConnection):  # type: ignore[misc]
    response_class = _Response


class _TlsConnections(AWSHTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _TlsConnection


def bound_answers(client: Any) -> None:
    """Have a client give up answers that have not come whole in time. No setting of botocore does
    it, and these attributes are its own: the log says so if a release of it has others.
    """
    kinds = {"http": _Connections, "https": _TlsConnections}
    try:
        http = client._endpoint.http_session  # noqa: SLF001
        http._pool_classes_by_scheme.update(kinds)  # noqa: SLF001
        used = http._manager.pool_classes_by_scheme  # noqa: SLF001
    except AttributeError:
        used = {}
    if any(used.get(scheme) is not kind for scheme, kind in kinds.items()):
        _log.warning(
            "answers of the bucket are not bounded with botocore %s: a server that sends a byte "
            "now and then may hold threads of this node", botocore.__version__,
        )  # fmt: skip


class S3Store:
    """See `ObjectStore`."""

    def __init__(
        self,
        config: ObjectStoreConfig,
        num_threads: int,
        read_s: float,
        write_s: float = WRITE_S,
    ) -> None:
        """`read_s`: an object that has not come whole by then is given up. `write_s`: the longest
        wait for the server while it takes a block, and for a page of names.

        Raises:
            ConfigError: there is no client for these settings.
        """
        self._bucket = config.bucket
        session = botocore.session.get_session()

        def client(connect_s: float, wait_s: float) -> Any:
            made = session.create_client(
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
            bound_answers(made)
            return made

        try:
            self._reader = client(CONNECT_S, read_s)
            # urllib3 sends a whole request within the time that it has to connect.
            self._writer = client(write_s, write_s)
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(f"kvstore.object_store: {error}") from error

    def put(self, name: str, data: bytearray) -> None:
        self._call(self._writer.put_object, Key=name, Body=bytes(data))

    def get(self, name: str, out: memoryview) -> int | None:
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
        except (BotoCoreError, HTTPClientError, HTTPError, OSError) as error:
            raise StoreError(str(error)) from error
        finally:
            body.close()
        return size

    def delete(self, name: str) -> None:
        try:
            self._call(self._writer.delete_object, Key=name)
        except StoreError as error:
            if _code(error.__cause__) not in _ABSENT:
                raise

    def listed(self, prefix: str) -> Iterator[tuple[str, float]]:
        more: dict[str, str] = {}
        while True:
            page = self._call(self._writer.list_objects_v2, Prefix=prefix, **more)
            for each in page.get("Contents", ()):
                yield each["Key"], each["LastModified"].timestamp()
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
