"""Large sampling settings on a worker: tasks that name them get them back, all the same object."""

from __future__ import annotations

import pytest

from mooncake.base import Grammar, RequestTask
from mooncake.base.large_settings import KeptSettings, SentSettings
from mooncake.rpc.codec import decode, encode
from tests.support.scheduler.scheduling import GATEWAY, ref, request


def arrived(sent: SentSettings, seed: int, letter: str = "x") -> tuple[RequestTask, RequestTask]:
    """Return a task with large settings, and what arrives of it."""
    generate = request(
        f"r{seed}",
        seed=seed,
        grammar=Grammar(text=letter * 90_000, end_ids=[1], triggers=[2]),
        logit_bias=dict.fromkeys(range(2000), -1.5),
        allowed_token_ids=list(range(2_000)),
        stop_token_ids=frozenset(range(500)),
        bad_words=[[token, 1] for token in range(500)],
    )
    task = RequestTask(request=generate, attempt=1, gateway=GATEWAY, decode=ref("d0"))
    message = decode(encode(sent.shortened(task, ref("p0"))))
    assert isinstance(message, RequestTask)
    return task, message


def test_all_tasks_of_a_call_come_whole_and_share_their_settings() -> None:
    sent, kept = SentSettings(), KeptSettings()
    samplings = []
    for seed in range(10):
        task, message = arrived(sent, seed)
        assert (message.settings is not None) == (seed == 0)
        whole = kept.completed(message)
        assert whole == task, "the request came out another one"
        samplings.append(whole.request.sampling)
    first = samplings[0]
    for each in samplings:
        assert each.grammar is first.grammar
        assert each.logit_bias is first.logit_bias
        assert each.allowed_token_ids is first.allowed_token_ids
        assert each.bad_words is first.bad_words
    kept.check_integrity()


def test_an_unknown_name_is_said() -> None:
    sent = SentSettings()
    arrived(sent, 0)  # lost on the way
    _, message = arrived(sent, 1)
    assert KeptSettings().completed(message) is None


@pytest.mark.parametrize("max_bytes", [0, 1_000_000])
def test_kept_settings_are_bounded(max_bytes: int) -> None:
    kept = KeptSettings(max_bytes)
    for number in range(20):
        task, message = arrived(SentSettings(), number, letter=chr(ord("a") + number))
        assert kept.completed(message) == task, "what came with the task must serve it"
        kept.check_integrity()
    assert bool(kept.num_bytes) == bool(max_bytes)
