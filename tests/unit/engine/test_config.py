"""EngineConfig refuses what could not work, by name."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.base.errors import ConfigError
from mooncake.engine.config import EngineConfig

GOOD: dict[str, Any] = {
    "num_blocks": 8,
    "max_num_seqs": 4,
    "max_batched_tokens": 16,
    "max_chunk_tokens": 16,
    "max_model_len": 100,
    "max_waiting": 10,
}


def test_defaults_are_those_of_the_design() -> None:
    config = EngineConfig(**GOOD)
    assert (config.block_tokens, config.enable_prefix_caching) == (64, True)
    assert config.max_steps_in_flight == 1


@pytest.mark.parametrize("key", [*GOOD, "block_tokens", "max_steps_in_flight"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "8", None])
def test_a_wrong_number_is_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{key}:"):
        EngineConfig(**{**GOOD, key: value})


@pytest.mark.parametrize("key", ["enable_prefix_caching", "in_lockstep"])
def test_a_truth_must_be_a_boolean(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}:"):
        EngineConfig(**{**GOOD, key: 1})


def test_a_step_must_have_a_token_for_each_sequence() -> None:
    with pytest.raises(ConfigError, match=r"^max_batched_tokens: 3 .*max_num_seqs \(4\)"):
        EngineConfig(**{**GOOD, "max_batched_tokens": 3})


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (64, 1), (65, 2)])
def test_pages_are_counted_whole(num_tokens: int, num_pages: int) -> None:
    assert EngineConfig(**GOOD).num_pages(num_tokens) == num_pages
