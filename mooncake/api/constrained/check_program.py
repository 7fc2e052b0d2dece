"""The program that checks JSON against schemas in its own process. A hostile schema can keep the
library busy for years (patterns that backtrack, choices within choices) or fill the memory.

It reads questions from its standard input and answers on its standard output, both as four bytes of
length (big endian) and JSON. A question is `[CPU seconds, text of the schema, text of the value]`.
An answer is the list of faults, each `[path, keyword, message]`, or a text that says why the value
could not be checked. One question that takes too long ends the process, by the kernel's timer.
"""

from __future__ import annotations

import itertools
import json
import resource
import signal
import sys
from typing import Any

import jsonschema
import referencing
import referencing.exceptions
from jsonschema.exceptions import ValidationError
from jsonschema.validators import validator_for

MAX_MEMORY_BYTES = 1 << 30
MAX_FAULTS = 5
MAX_MESSAGE_CHARS = 300
MAX_PATH_CHARS = 300


def faults(schema: Any, value: Any) -> list[list[str]]:
    """Return the first faults of `value`. References are followed within `schema` only."""
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    registry: Any = referencing.Registry()  # it knows no other document and fetches none
    found = kind(schema, registry=registry).iter_errors(value)
    return [_fault(error) for error in itertools.islice(found, MAX_FAULTS)]


def _fault(error: ValidationError) -> list[str]:
    steps = (str(step).replace("~", "~0").replace("/", "~1") for step in error.absolute_path)
    path = "".join(f"/{step}" for step in steps)
    return [path[:MAX_PATH_CHARS], str(error.validator), error.message[:MAX_MESSAGE_CHARS]]


def answer(schema: str, value: str) -> list[list[str]] | str:
    """Return the answer to one question."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return [["", "type", "it is not valid JSON"]]
    try:
        return faults(json.loads(schema), parsed)
    except referencing.exceptions.Unresolvable as error:
        return f"the schema refers to {error.ref!r}, which it does not have"[:MAX_MESSAGE_CHARS]
    except Exception as error:  # wrong schemas may raise any error
        return f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]


def main() -> None:
    """Answer questions until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends the input
    read, write = sys.stdin.buffer.read, sys.stdout.buffer.write
    while head := read(4):
        limit_s, schema, value = json.loads(read(int.from_bytes(head, "big")))
        signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)  # its signal ends the process
        said = json.dumps(answer(schema, value)).encode()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        write(len(said).to_bytes(4, "big") + said)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
