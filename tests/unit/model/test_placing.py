"""Weights are copied by several threads, through a buffer of each where that is asked for."""

import threading
from functools import partial

import pytest
import torch

from mooncake.model.placing import Placer


@pytest.mark.parametrize("staged", [False, True])
def test_all_arrive_in_any_dtype(staged: bool) -> None:
    sources = [torch.randn(3 + number % 5, 7 * number + 1) for number in range(40)]
    places = [torch.empty_like(source, dtype=torch.bfloat16) for source in sources]
    with Placer(4, staged=staged) as placer:
        placer.do(
            partial(placer.copy, source, place)
            for source, place in zip(sources, places, strict=True)
        )
    for source, place in zip(sources, places, strict=True):
        assert torch.equal(place, source.to(torch.bfloat16))


def test_threads_are_in_the_mode_of_their_caller() -> None:
    source = torch.randn(4, 4)
    with torch.inference_mode(), Placer(2) as placer:
        place = torch.empty(4, 4)
        placer.do([partial(placer.copy, source, place)])
        assert torch.equal(place, source)


def test_several_at_once() -> None:
    """Each task waits for the other: one thread alone would never end."""
    both = threading.Barrier(2, timeout=240)
    with Placer(2) as placer:
        placer.do([lambda: both.wait() and None, lambda: both.wait() and None])


def test_a_failure_comes_out_when_nothing_runs_any_more() -> None:
    done: list[int] = []

    def fail() -> None:
        raise ValueError("tensor 3 is torn")

    with Placer(2) as placer:
        with pytest.raises(ValueError, match="tensor 3 is torn"):
            placer.do([partial(done.append, 1), fail, *(partial(done.append, n) for n in range(9))])
        count = len(done)
        placer.do([])
        assert len(done) == count
    assert not [t for t in threading.enumerate() if t.name.startswith("place-weights")]
