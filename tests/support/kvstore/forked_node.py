"""Pool nodes forked from a process that has imported everything: up in a fraction of the time that
a fresh interpreter takes, for tests that need many of them. Real processes all the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.kvstore.pool_process import SECRET, PoolProcess
from tests.support.serve import forked_program


class ForkedNode(PoolProcess):
    """A `PoolProcess` that starts fast."""

    def _start(self, command: Sequence[str], log: Path) -> Any:
        environ = {**os.environ, "MOONCAKE_CLUSTER_SECRET": SECRET}
        with log.open("wb") as out:
            return forked_program.start(command, environ, out.fileno())
