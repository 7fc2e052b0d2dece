"""What requests share at a gateway over other people's engines."""

from __future__ import annotations

import asyncio

import pytest

from mooncake.api.config import ApiConfig
from mooncake.api.engines.asked import COMPLETIONS, Asked
from mooncake.api.engines.proxy import EngineProxy
from mooncake.base import MonotonicClock, SystemIds
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.engines.fleet import Fleet
from mooncake.scheduler.engines.prefixes import Prompt
from mooncake.telemetry.events import Recorders

ENGINE = "http://127.0.0.1:1"


def test_no_block_of_a_prompt_is_hashed_before_an_engine_has_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of one token would hold up all streams: there are as many as tokens."""
    monkeypatch.setattr(Prompt, "blocks", None)

    async def main() -> None:
        proxy = EngineProxy(
            Fleet([ENGINE], SchedulerConfig()), [ENGINE], ApiConfig(), ids=SystemIds(),
            clock=MonotonicClock(), recorder=Recorders(), metrics=lambda _: b"",
        )  # fmt: skip
        asked = Asked.of(COMPLETIONS, b'{"prompt": [1, 2, 3]}')
        assert (await proxy.prompt_of(asked, {})).num_tokens == 3

    asyncio.run(main())
