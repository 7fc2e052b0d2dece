"""A short round on every target, and campaigns on parsers with a planted fault: each is found.

The rounds count inputs, not seconds, and are the same each time. `make fuzz` runs long ones.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fuzz.__main__ import main
from tests.support.examples import examples
from tests.support.fuzz import campaign as campaigns
from tests.support.fuzz.campaign import Campaign, replay
from tests.support.fuzz.execution import Execution, Slate
from tests.support.fuzz.exploring import grows_faster
from tests.support.fuzz.mutate import Mutator
from tests.support.fuzz.registry import NAMES, target_of
from tests.support.fuzz.target import Target
from tests.support.fuzz.targets import planted

pytestmark = [
    pytest.mark.timeout(600),
    # Newer Pythons warn that other threads of this process do not come along: none is needed.
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

NUM_INPUTS = max(80, examples(250))
"""Of fewer, none may take a new way."""


@pytest.fixture(autouse=True)
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings that end a process are dear: a few show that they are found and made smaller."""
    monkeypatch.setattr(campaigns, "MAX_DEATHS", 2)
    monkeypatch.setattr(campaigns, "MAX_SMALLER_APART", 8)


def play(target: type[Target], out: Path, num_inputs: int, seed: int = 0) -> Campaign:
    campaign = Campaign(target)
    campaign.run(seed, out, lambda _: None, num_inputs=num_inputs)
    return campaign


def shown(campaign: Campaign) -> str:
    return "\n".join(
        f"{one.problem.signature}\n{one.problem.text}\n{one.data!r:.2000}"
        for one in campaign.findings.values()
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_short_round_finds_nothing(name: str, tmp_path: Path) -> None:
    campaign = play(target_of(name), tmp_path, NUM_INPUTS)
    assert not campaign.findings, shown(campaign)
    assert campaign.figures.num_inputs >= NUM_INPUTS
    assert campaign.figures.num_kept > 0, "no mutation took a new way"


@pytest.mark.parametrize("name", NAMES)
def test_recorded_seeds_are_understood(name: str) -> None:
    """Seeds that are all refused are of another version: `python -m tests.fuzz.record`."""
    target = target_of(name)()
    accepted = 0
    for data in campaigns.corpus_of(type(target)):
        try:
            target.run(data)
        except target.allowed:
            continue
        accepted += 1
    target.close()
    assert accepted > 0, "record the seeds anew: python -m tests.fuzz.record"


def fits(found: str, signature: str) -> bool:
    """Whether a finding is of this kind: an error's signature also says where it was raised."""
    return found == signature or (signature.endswith("Error") and found.startswith(signature))


@pytest.mark.parametrize(
    ("target", "signature"),
    [
        (planted.WrongError, "KeyError"),
        (planted.LongError, "AssertionError"),
        (planted.Endless, "time without end"),
        (planted.Crash, "death by SIGSEGV"),
        (planted.Slow, "time"),
        (planted.Square, "growth"),
    ],
)
def test_a_planted_fault_is_found(target: type[Target], signature: str, tmp_path: Path) -> None:
    campaign = play(target, tmp_path, 600 if signature == "growth" else 200)
    finding = next((v for k, v in campaign.findings.items() if fits(k, signature)), None)
    assert finding is not None, shown(campaign)
    assert finding.path.read_bytes() == finding.data
    if signature not in ("growth", "time"):  # which show between inputs, or just above a limit
        again = replay(target, finding.data)
        assert again is not None
        assert again.signature == finding.problem.signature


def test_too_much_memory_is_found_whether_there_is_so_much_or_not(tmp_path: Path) -> None:
    findings = play(planted.Greedy, tmp_path, 400).findings
    assert "memory" in findings
    assert any(name.startswith("MemoryError") for name in findings), list(findings)


def test_an_input_that_waits_for_ever_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaigns, "STUCK_S", 1.5)
    monkeypatch.setattr(campaigns, "MAX_SMALLER_APART", 2)
    assert list(play(planted.Waits, tmp_path, 400).findings) == ["stuck"]


def test_findings_are_made_small(tmp_path: Path) -> None:
    [finding] = play(planted.WrongError, tmp_path, 400).findings.values()
    assert finding.data == b"sz"


def test_a_round_is_the_same_again(tmp_path: Path) -> None:
    def ways(seed: int) -> tuple[int, int, int]:
        figures = play(target_of("handshake"), tmp_path, 150, seed).figures
        return figures.num_inputs, figures.num_ways, figures.num_kept

    assert ways(1) == ways(1)


def test_lines_are_what_tells_inputs_apart() -> None:
    target = planted.WrongError

    class Unguarded(Execution):
        """Without limits, which would hold for this process."""

        def __init__(self) -> None:
            self.target = target()
            self._slate = Slate(100)
            self._slack = 1.0

    assert target.modules
    from tests.support.fuzz.tracing import Tracing

    def edges(data: bytes) -> set[object]:
        with Tracing(target.modules) as tracing:
            Unguarded()._fed(data)
        return set(tracing.edges)

    assert edges(b"x") != edges(b"s")
    assert edges(b"sz") == edges(b"saaz")
    assert edges(b"saz") - edges(b"sz")


@pytest.mark.parametrize("name", NAMES)
def test_mutations_stay_within_the_size(name: str) -> None:
    from random import Random

    target = target_of(name)
    mutator = Mutator(Random(0), target)
    corpus = campaigns.corpus_of(target)
    made = [mutator.mutate(corpus) for _ in range(200)]
    assert max(map(len, made)) <= target.max_bytes
    assert len(set(made)) > 100


@pytest.mark.parametrize(
    ("taken_s", "squares"),
    [([0.1, 0.4, 1.6], True), ([0.1, 0.2, 0.4], False), ([0.0, 0.0, 0.05], False),
     ([0.1, 0.1, 0.9], False)],
)  # fmt: skip
def test_squares_are_told_from_lines(taken_s: list[float], squares: bool) -> None:
    assert grows_faster(taken_s) is squares


def test_the_command_prints_figures_and_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--target", "handshake", "--inputs", "50", "--out", str(tmp_path), "--json"]
    assert main(words) == 0
    [facts] = json.loads(capsys.readouterr().out)
    assert facts["target"] == "handshake"
    assert facts["findings"] == []
    seed = next(iter(sorted((campaigns.CORPUS / "handshake").iterdir())))
    assert main(["--target", "handshake", "--replay", str(seed)]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    assert main(["--replay", str(seed)]) == 2
