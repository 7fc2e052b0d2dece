"""How slow this machine is just now: what may take so long on a usual one may take as many times
longer here.
"""

from __future__ import annotations

import json
import time

USUAL_S = 0.05
"""CPU seconds of the work on the machine for which tests state what may take how long."""
_TEXT = json.dumps({f"name_{at}": [at, str(at), {"a": at / 7}] for at in range(6000)})
_TIMES = 4


def slowness() -> float:
    """Return how many times as long as usual this thread takes for the same work; 1 at least.

    The work is parsing and writing JSON; waiting for a core does not count.
    """
    began_s = time.thread_time()
    for _ in range(_TIMES):
        assert sum(map(len, map(str, json.loads(_TEXT).values()))) > len(_TEXT) // 2
    return max(1.0, (time.thread_time() - began_s) / USUAL_S)
