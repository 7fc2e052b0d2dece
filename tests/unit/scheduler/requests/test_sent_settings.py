"""Large sampling settings travel to each worker once, and again when it does not have them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake.base import Failure, Grammar, RequestTask, Role, SamplingParams
from mooncake.base import large_settings as settings_module
from mooncake.base.large_settings import (
    LARGE_SETTINGS,
    SentSettings,
    large_settings,
    name_setting,
)
from mooncake.rpc.codec import encode
from tests.support.scheduler.scheduling import GATEWAY, ref, request
from tests.unit.scheduler.requests.test_request_manager import Bench

LARGE: dict[str, Any] = {
    "grammar": Grammar(text="start: " + "x" * 100_000, end_ids=[1]),
    "logit_bias": dict.fromkeys(range(5000), 1.0),
    "allowed_token_ids": list(range(20_000)),
    "stop_token_ids": frozenset(range(1_000)),
    "bad_words": [[token, token] for token in range(1_000)],
}


def wire_bytes(num_choices: int, num_prompts: int = 1, **settings: Any) -> dict[str, int]:
    """Return the bytes that each worker is sent for a call, all of it at once."""
    bench = Bench(max_inflight=1000)
    bench.join("p0", Role.PREFILL)
    bench.join("d0", Role.DECODE, num_blocks=100_000)
    for which in range(num_choices * num_prompts):
        prompt = [which // num_choices + 1, *range(15)]
        bench.submit(request(f"r{which}", prompt_tokens=prompt, seed=which, **settings))
    sizes: dict[str, int] = {}
    for address, message in bench.channel.sent:
        if isinstance(message, RequestTask):
            sizes[address] = sizes.get(address, 0) + len(encode(message))
    assert set(sizes) == {ref("p0").address, ref("d0").address}
    return sizes


@pytest.mark.parametrize("field", LARGE)
def test_128_choices_cost_little_more_than_one(field: str) -> None:
    settings = {field: LARGE[field]}
    small = wire_bytes(128)
    for num_choices, num_prompts in ((128, 1), (16, 8)):
        one, many = wire_bytes(1, **settings), wire_bytes(num_choices, num_prompts, **settings)
        for address in one:
            assert one[address] > 2_000, "this setting is not large"
            assert many[address] < one[address] + small[address] + 128 * 80


def test_every_container_of_the_sampling_settings_can_be_named() -> None:
    unbounded = {
        field.name
        for field in msgspec.structs.fields(SamplingParams)
        if field.default_factory is not msgspec.NODEFAULT
        or isinstance(field.default, frozenset)
        or field.name == "grammar"
    }
    assert unbounded == set(LARGE_SETTINGS)
    assert set(large_settings(SamplingParams(**LARGE))) == unbounded
    assert large_settings(SamplingParams(stop_token_ids=frozenset({1, 2}))) == {}


def test_names_follow_from_content_and_field() -> None:
    ids = LARGE["stop_token_ids"]
    backwards = frozenset(sorted(ids, reverse=True))
    assert name_setting("stop_token_ids", ids) == name_setting("stop_token_ids", backwards)
    assert name_setting("stop_token_ids", ids) != name_setting("allowed_token_ids", ids)
    assert name_setting("stop_token_ids", ids) != name_setting("stop_token_ids", ids - {1})


def carried(bench: Bench, worker: str) -> list[bool]:
    """Return for each decode task of a worker whether it carries settings."""
    tasks = bench.channel.of(RequestTask, ref(worker).address)
    return [task.settings is not None for task in tasks]


def test_a_worker_that_turns_a_task_away_gets_its_settings_again() -> None:
    bench = Bench(needs_prefill=False)
    decode = bench.join("d0", Role.DECODE)
    bench.submit(request("a", grammar=LARGE["grammar"]))
    bench.submit(request("b", grammar=LARGE["grammar"]))
    bench.fail(decode, "b", Failure.turned_away("it does not have them"))
    bench.manager.tick(100.0)
    assert carried(bench, "d0") == [True, False, True]
    assert bench.manager.states() == {"prefilling": 2}


def test_another_boot_of_a_worker_gets_them_again() -> None:
    bench = Bench(needs_prefill=False)
    bench.join("d0", Role.DECODE)
    bench.submit(request("a", grammar=LARGE["grammar"]))
    bench.lose("d0", 1.0)
    bench.join("d0", Role.DECODE, now=1.0, epoch="e1")
    tasks = bench.channel.of(RequestTask)
    assert [(task.settings is not None) for task in tasks] == [True, True]
    bench.submit(request("b", grammar=LARGE["grammar"]), now=1.0)
    assert bench.channel.of(RequestTask)[-1].settings is None


def test_what_was_sent_is_bounded_and_the_oldest_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings_module, "MAX_SENT_BYTES", 400_000)
    sent, worker = SentSettings(), ref("d0")

    def carries(letter: str, length: int = 90_000) -> bool:
        grammar = Grammar(text=letter * length, end_ids=[])
        task = RequestTask(
            request=request(grammar=grammar), attempt=1, gateway=GATEWAY, decode=worker
        )
        short = sent.shortened(task, worker)
        assert short.named
        return short.settings is not None

    assert [carries(letter) for letter in "abcdabcd"] == [True] * 4 + [False] * 4
    assert carries("e")
    assert [carries(letter) for letter in "bcdea"] == [False] * 4 + [True]
