"""A prefix that a request wants kept is in the pool for its next turn, whatever other tenants
compute meanwhile, and for no longer than it was asked for. In a whole simulated cluster.
"""

from __future__ import annotations

import msgspec
import pytest

from mooncake.sim.world.world import Stream
from tests.sim.test_cluster import EAGER, PROMPT, prompts
from tests.support.sim.cluster import LAYOUT, Cluster, engine_config, request, specs

POOL_BLOCKS = 128
KEPT_BLOCKS = POOL_BLOCKS // 8
NUM_ANSWER = 8
ABSENT = 1 << 20
"""A token that the model never samples."""
NUM_REUSABLE = (len(PROMPT) - 1) // LAYOUT.block_tokens * LAYOUT.block_tokens


class Story:
    """A cluster with little memory, an agent with a prefix, and others who fill the memory."""

    def __init__(self, num_prefill: int) -> None:
        small = engine_config(32)
        self.cluster = Cluster(
            specs(num_prefill, 1), scheduler=EAGER, prefill=small, decode=small,
            pool_blocks=POOL_BLOCKS,
        )  # fmt: skip
        self._num_asked = 0
        self.answer: list[int] = []
        """That of the agent's last turn."""

    def ask(self, prompt: list[int], **fields: object) -> Stream:
        self._num_asked += 1
        asked = request(f"r{self._num_asked}", prompt, max_tokens=NUM_ANSWER)
        stream = self.cluster.world.submit(msgspec.structs.replace(asked, **fields))
        self.cluster.run(1)
        return stream

    def turn(self, said: list[int] = PROMPT, **fields: object) -> int:
        """Ask as the agent; return how many tokens of the prompt were cached."""
        stream = self.ask(said, tenant="agent", **fields)
        self.answer = stream.tokens
        [final] = stream.finals
        return final.num_cached_tokens

    def flood(self, seed: int) -> None:
        """Fill all memory twice with what another tenant asks."""
        for prompt in prompts(2 * POOL_BLOCKS * LAYOUT.block_tokens // 40, seed=seed):
            self.ask(prompt, tenant="other")

    @property
    def num_kept(self) -> int:
        return max(pool.state().num_kept for pool in self.cluster.pools())


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_the_prefix_of_an_agent_outlives_a_flood_and_ends_with_its_time(num_prefill: int) -> None:
    story = Story(num_prefill)
    keep = {"num_kept_tokens": len(PROMPT), "keep_s": 300.0}
    assert story.turn(**keep) == 0
    story.flood(seed=1)
    assert story.turn(**keep) == NUM_REUSABLE
    assert story.num_kept == len(PROMPT) // LAYOUT.block_tokens <= KEPT_BLOCKS
    story.flood(seed=2)
    assert story.turn() == NUM_REUSABLE
    story.cluster.run(310)
    assert story.num_kept == 0
    story.flood(seed=3)
    assert story.turn() == 0, "its time is over"
    story.cluster.check_streams()
    story.cluster.check_quiet()


@pytest.mark.parametrize("num_prefill", [0, 1])
@pytest.mark.parametrize(
    ("keeps_answer", "call_at", "is_kept"),
    [(True, None, True), (False, None, False), (True, 3, True), (True, -1, False)],
)
def test_the_answer_of_an_agent_outlives_a_flood_and_ends_with_its_time(
    num_prefill: int, keeps_answer: bool, call_at: int | None, is_kept: bool
) -> None:
    """With a `call_token` only if the answer holds it. Of the last block, which is not full, no
    pool has a copy. Where prompts are computed on another node, the flood does not fill the pool
    that holds answers.
    """
    story = Story(num_prefill)
    assert story.turn() == 0
    call_token = None
    if call_at is not None:
        call_token = story.answer[call_at] if call_at >= 0 else ABSENT
        assert (call_token in story.answer) is is_kept
    keep = {
        "num_kept_tokens": len(PROMPT), "keep_s": 300.0, "keeps_answer": keeps_answer,
        "call_token": call_token,
    }  # fmt: skip
    story.turn(**keep)
    said = [*PROMPT, *story.answer]
    num_whole = (len(said) - 1) // LAYOUT.block_tokens * LAYOUT.block_tokens
    assert num_whole > NUM_REUSABLE
    num_kept = sum(pool.state().num_kept for pool in story.cluster.pools())
    assert num_kept * LAYOUT.block_tokens == (num_whole if is_kept else NUM_REUSABLE)
    story.flood(seed=1)
    found = story.turn([*said, 1, 2, 3])
    assert found == (num_whole if is_kept or num_prefill else NUM_REUSABLE)
    story.cluster.run(310)
    assert story.num_kept == 0
    story.cluster.check_streams()
    story.cluster.check_quiet()


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_without_marks_the_flood_evicts_it(num_prefill: int) -> None:
    story = Story(num_prefill)
    assert story.turn() == 0
    story.flood(seed=1)
    assert story.turn() == 0


def test_one_who_keeps_everything_takes_no_more_than_the_part_of_a_tenant() -> None:
    story = Story(1)
    for prompt in prompts(40, seed=4):
        kept = {"num_kept_tokens": len(prompt), "keep_s": 3600.0, "keeps_answer": True}
        story.ask(prompt, tenant="greedy", **kept)
    assert 0 < story.num_kept <= KEPT_BLOCKS
    assert story.turn(num_kept_tokens=len(PROMPT), keep_s=300.0) == 0
    assert story.turn() == NUM_REUSABLE, "others are cached as before"
    story.cluster.check_streams()
    story.cluster.check_quiet()
