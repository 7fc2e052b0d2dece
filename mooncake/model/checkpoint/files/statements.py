"""JSON files in which a checkpoint states what its weights are. Others wrote them, so they are read
with care. Stateless.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import msgspec

from mooncake.base import CheckpointError

FILE_NAME = re.compile(r"[^/\0]{1,240}\.safetensors")
DIGEST = re.compile(r"[0-9a-f]{64}")

Statement = TypeVar("Statement")


def read_statement(path: Path, kind: type[Statement], what: str) -> Statement | None:
    """Return the content of the file at `path`; None: there is no such file.

    Raises:
        CheckpointError: it cannot be read, or does not state `what`.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: does not say {what} ({error!s:.200})") from error
