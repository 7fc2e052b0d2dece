"""Our connector with a line in vLLM's log for each step that saves blocks, so that a benchmark
knows how long the step waits for that. vLLM imports it.
"""

from __future__ import annotations

import json
import time

from mooncake.integrations.vllm.connector import MooncakePoolConnector
from mooncake.integrations.vllm.lookups import logger


class TimedSaves(MooncakePoolConnector):
    """The connector as it is. Times are of the machine's monotonic clock."""

    def wait_for_save(self) -> None:
        begun_s = time.monotonic()
        super().wait_for_save()
        if self._get_connector_metadata().jobs.saves:
            ended_s = time.monotonic()
            step = {"copy_s": ended_s - begun_s, "ended_s": ended_s}
            logger.info("timed step %s", json.dumps(step))
