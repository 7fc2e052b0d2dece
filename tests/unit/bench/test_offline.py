"""Offline figures under a scripted clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mooncake.bench.offline import latency, throughput
from mooncake.bench.samples import Sample


def samples(count: int) -> list[Sample]:
    return [Sample(prompt=[1] * 30, num_prompt_tokens=30, num_output_tokens=5)] * count


class Engine:
    """Takes so many seconds a batch, in turn."""

    def __init__(self, *seconds: float) -> None:
        self._left = list(seconds)
        self.now = 0.0
        self.batches: list[int] = []

    def generate(self, batch: Sequence[Sample]) -> int:
        self.batches.append(len(batch))
        self.now += self._left.pop(0)
        return sum(sample.num_output_tokens for sample in batch)

    @property
    def clock(self) -> Callable[[], float]:
        return lambda: self.now


def test_throughput_lines_and_document() -> None:
    engine = Engine(2.0)
    result = throughput(engine.generate, samples(4), engine.clock)
    assert result.lines() == [
        "Throughput: 2.00 requests/s, 70.00 total tokens/s, 10.00 output tokens/s",
        "Total num prompt tokens:  120",
        "Total num output tokens:  20",
    ]
    assert result.document() == {
        "elapsed_time": 2.0,
        "num_requests": 4,
        "total_num_tokens": 140,
        "requests_per_second": 2.0,
        "tokens_per_second": 70.0,
    }


def test_latency_leaves_warm_ups_out() -> None:
    engine = Engine(9.0, 1.0, 3.0)
    done = []
    result = latency(engine.generate, [samples(2)] * 3, 1, lambda: done.append(1), engine.clock)
    assert engine.batches == [2, 2, 2]
    assert len(done) == 3
    assert result.seconds == (1.0, 3.0)
    assert result.lines()[0] == "Avg latency: 2.0 seconds"
    assert result.lines()[1] == "10% percentile latency: 1.2 seconds"
    assert [line.split("%")[0] for line in result.lines()[1:]] == [
        "10",
        "25",
        "50",
        "75",
        "90",
        "99",
    ]
    document = result.document()
    assert (document["avg_latency"], document["latencies"]) == (2.0, [1.0, 3.0])
    assert document["percentiles"]["50"] == 2.0
