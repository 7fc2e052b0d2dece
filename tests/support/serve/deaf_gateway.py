"""`mooncake` in a process that loses, one way, what one worker sends: a link that is broken so.

The environment names a file; while that holds a worker's id, the worker is not heard here.
"""

from __future__ import annotations

import os
from pathlib import Path

from mooncake.base.pool_messages import AnyMessage
from mooncake.cli import main as cli
from mooncake.rpc.zmq_channel import ZmqChannel

DEAF_TO = "MOONCAKE_TEST_DEAF_TO"

_receive = ZmqChannel.receive


def receive(channel: ZmqChannel) -> list[AnyMessage]:
    """Return what has arrived, without what the worker named in the file has sent."""
    file = Path(os.environ[DEAF_TO])
    unheard = file.read_text() if file.exists() else ""
    return [message for message in _receive(channel) if _sender_id(message) != unheard]


def _sender_id(message: AnyMessage) -> str | None:
    return getattr(getattr(message, "worker", None), "worker_id", None)


if __name__ == "__main__":
    ZmqChannel.receive = receive  # type: ignore[method-assign]
    cli.program()
