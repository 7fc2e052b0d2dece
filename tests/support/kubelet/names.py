"""The cluster's DNS: addresses of Services and of pods behind them, over UDP, and nothing else.

The part of RFC 1035 that resolvers of pods use: one question a datagram, A records in the answer.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence

DOMAIN = "default.svc.cluster.local"
TTL_S = 1
_ADDRESS, _INTERNET, _POINTER = 1, 1, 0xC00C
_ANSWER, _NO_SUCH_NAME = 0x8580, 0x8583

RESOLV_CONF = f"nameserver {{}}\nsearch {DOMAIN} svc.cluster.local\noptions ndots:5\n"


class NameServer:
    """Answers at port 53 of `host` from what `lookup` says: addresses, or None for no such name."""

    def __init__(self, host: str, lookup: Callable[[str], Sequence[str] | None]) -> None:
        self._lookup = lookup
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((host, 53))
        self._thread = threading.Thread(target=self._serve, name="names", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            question, asker = self._socket.recvfrom(4096)
            if not question:
                return
            self._socket.sendto(self._answered(question), asker)

    def _answered(self, question: bytes) -> bytes:
        labels, at = [], 12
        while size := question[at]:
            labels.append(question[at + 1 : at + 1 + size].decode())
            at += 1 + size
        end = at + 5
        [kind] = struct.unpack_from("!H", question, at + 1)
        found = self._lookup(".".join(labels).lower())
        addresses = list(found or ()) if kind == _ADDRESS else []
        flags = _NO_SUCH_NAME if found is None else _ANSWER
        head = question[:2] + struct.pack("!5H", flags, 1, len(addresses), 0, 0)
        records = [
            struct.pack("!3HIH", _POINTER, _ADDRESS, _INTERNET, TTL_S, 4) + socket.inet_aton(each)
            for each in addresses
        ]
        return head + question[12:end] + b"".join(records)

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
            waker.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()
