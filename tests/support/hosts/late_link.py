"""Forwards frames between two network devices, each one some time after it came: a program of its
own, with the standard library alone. netem, which does this and more, is in few kernels.

    python late_link.py ONE OTHER SECONDS

It says "forwards" once it does, and then nothing. A device that is down loses frames.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections import deque

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, ETH_P_ALL = 263, 15, 23, 3
MOST_BYTES = 2**17
"""What a device may hand over at once, with the header that says what it has left to others: to
cut long segments of TCP, and to compute checksums.
"""
MOST_FRAMES = 10_000
"""More than these under way are lost."""
BUFFER_BYTES = 2**24


def opened(device: str) -> socket.socket:
    """Return a socket that gets what comes from a device, and sends by it."""
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    raw.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    raw.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    raw.bind((device, 0))
    return raw


def forward(one: socket.socket, other: socket.socket, seconds: float) -> None:
    """Forward both ways for ever."""
    under_way = deque[tuple[float, socket.socket, bytes]]()
    poll = select.poll()
    ways = {one.fileno(): (one, other), other.fileno(): (other, one)}
    for number in ways:
        poll.register(number, select.POLLIN)
    while True:
        left_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for number, _ in poll.poll(None if left_s is None else left_s * 1000):
            source, target = ways[number]
            with contextlib.suppress(OSError):  # it has just gone down
                frame = source.recv(MOST_BYTES)
                if len(under_way) < MOST_FRAMES:
                    under_way.append((time.monotonic() + seconds, target, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, target, frame = under_way.popleft()
            with contextlib.suppress(OSError):
                target.send(frame)


if __name__ == "__main__":
    devices = [opened(device) for device in sys.argv[1:3]]
    print("forwards", flush=True)
    forward(devices[0], devices[1], float(sys.argv[3]))
