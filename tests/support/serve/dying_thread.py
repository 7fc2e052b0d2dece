"""A worker in a process of its own, one of whose threads gets an exception wherever it is: settings
on the first line of stdin, the name of a thread on the second; prints the names of all threads when
it has joined.
"""

from __future__ import annotations

import base64
import ctypes
import json
import logging
import sys
import threading
import time

import msgspec

from mooncake.base import MooncakeError
from mooncake.launch.host.processes.vital_threads import end_with_vital_threads
from mooncake.launch.worker import process
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.launch.worker.worker import Worker
from mooncake.transfer.regions import no_progress
from tests.support.serve.local_world import HashModel

OWN = "reader of stdin"


class Died(Exception):
    """What the thread gets."""


dying = threading.Event()
"""A thread has got it, and says so. Another one would hit it in the middle of that."""


def read_name() -> None:
    """Raise in the thread that is named, again and again until it dies: it may be deep in a call in
    C.
    """
    name = sys.stdin.readline().strip()
    while not dying.wait(0.5):
        for thread in threading.enumerate():
            if thread.name == name and thread.ident is not None:
                kind = ctypes.py_object(Died)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), kind)


def started(worker: Worker) -> None:
    def joined() -> None:
        while not worker.driver.call(lambda machine, _: is_joined(machine)).result():
            time.sleep(0.02)
        names = sorted({thread.name for thread in threading.enumerate()} - {OWN, "joined"})
        print(json.dumps(names), flush=True)

    threading.Thread(target=joined, name="joined", daemon=True).start()


def is_joined(machine: object) -> bool:
    return bool(machine.joined)  # type: ignore[attr-defined]


def main() -> None:
    logging.basicConfig(stream=sys.stderr)
    written = base64.b64decode(sys.stdin.readline())
    settings = msgspec.msgpack.decode(written, type=WorkerSettings)
    process.open_model = lambda *_: HashModel(settings.weights_revision)  # type: ignore[assignment]
    end_with_vital_threads()
    say_and_end = threading.excepthook

    def on_fault(fault: threading.ExceptHookArgs) -> None:
        dying.set()
        say_and_end(fault)

    threading.excepthook = on_fault
    threading.Thread(target=read_name, name=OWN, daemon=True).start()
    try:
        process.run(settings, progress=no_progress, started=started)
    except (MooncakeError, Died):
        sys.exit(1)


if __name__ == "__main__":
    main()
