"""Drawing without a sort against the definition with one, and against the sampler's plain torch."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.native import build
from mooncake_kernels.reference.sampling import DrawSettings, Penalties

from mooncake.model.layers import sampling_math
from tests.support.kernels.gates import DEVICE

ROWS, VOCAB = 6, 300
needs_compiled_code = pytest.mark.skipif(
    DEVICE.type != "cpu" or build.why_not() is not None, reason="computes on the CPU, by g++"
)
BACKENDS = ["triton", pytest.param("native", marks=needs_compiled_code)]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def settings(rows: int, **given: list[float]) -> DrawSettings:
    plain: dict[str, Any] = {
        "temperature": (torch.float32, 1.0), "top_k": (torch.int32, 0),
        "top_p": (torch.float64, 1.0), "min_p": (torch.float64, 0.0),
        "uniform": (torch.float64, 0.5),
    }  # fmt: skip
    made = {
        name: torch.tensor(given.get(name, [value] * rows), dtype=dtype, device=DEVICE)
        for name, (dtype, value) in plain.items()
    }
    return DrawSettings(**made)


def logits(rows: int = ROWS, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * 2).to(DEVICE)


SPREAD = [0.0, 0.2, 0.45, 0.7, 0.9, 0.999999]


@each_backend
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"top_k": [1, 2, 5, 17, 299, 300]},
        {"top_p": [0.0, 0.1, 0.5, 0.8, 0.95, 0.9999]},
        {"min_p": [0.001, 0.01, 0.05, 0.2, 0.9, 1.0]},
        {"top_k": [0, 3, 50, 8, 0, 40], "top_p": [0.9, 0.5, 0.7, 1.0, 0.3, 0.99]},
        {"temperature": [0.0, 0.3, 0.7, 1.5, 3.0, 0.0], "top_p": [0.9] * 6, "min_p": [0.02] * 6},
    ],
)
def test_same_tokens_as_the_definition(backend: str, given: dict[str, list[float]]) -> None:
    rows = settings(ROWS, uniform=SPREAD, **given)
    got = kernel("draw", backend)(logits(), rows)
    assert got.tolist() == kernel("draw")(logits(), rows).tolist()


def test_the_definition_is_the_engines_own() -> None:
    """What plain torch draws on the CPU: the same settings give the same tokens."""
    given = settings(
        ROWS, temperature=[0.5, 1, 1, 2, 1, 0.8], uniform=SPREAD, top_k=[0, 4, 0, 30, 7, 0],
        top_p=[1, 0.9, 0.6, 0.95, 1, 0.2], min_p=[0, 0, 0.01, 0, 0.1, 0],
    )  # fmt: skip
    wanted = sampling_math.draw(logits(seed=1), given).tolist()
    assert kernel("draw")(logits(seed=1), given).tolist() == wanted
    assert kernel("draw", "triton")(logits(seed=1), given).tolist() == wanted


@needs_compiled_code
@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 1792, 9_000])
@pytest.mark.parametrize("scale", [1e-6, 0.1, 2.0, 60.0])
def test_compiled_code_draws_what_plain_torch_draws(vocab: int, scale: float) -> None:
    """Also where many tokens tie, so that nothing narrows what is in question."""
    random = Random(vocab)
    rows = 48
    given = settings(
        rows,
        temperature=[random.choice([0.1, 0.7, 1.0, 5.0]) for _ in range(rows)],
        top_k=[random.choice([0, 1, 40, vocab // 2, vocab - 1, vocab]) for _ in range(rows)],
        top_p=[random.choice([0.0, 1e-9, 0.5, 0.95, 0.999, 1.0]) for _ in range(rows)],
        min_p=[random.choice([0.0, 0.0, 1e-4, 0.3]) for _ in range(rows)],
        uniform=[random.choice([0.0, random.random(), 1 - 2**-53]) for _ in range(rows)],
    )
    values = logits(rows, vocab, seed=vocab) * scale
    values[1::4] = (values[1::4] * 3 / scale).round() / 3  # many tie
    values[2::4] = values[2::4, :1]  # all do
    values[3::4, 1::2] = -torch.inf
    wanted = sampling_math.draw(values, given)
    assert torch.equal(kernel("draw", "native")(values, given), wanted)


def test_a_vocabulary_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from mooncake_kernels.triton import sampling

    monkeypatch.setattr(sampling, "_BLOCK", 128)
    rows = settings(3, uniform=[0.1, 0.6, 0.97], top_k=[0, 20, 0], top_p=[0.9, 1, 1])
    values = logits(3, 301, seed=2)
    assert kernel("draw", "triton")(values, rows).tolist() == kernel("draw")(values, rows).tolist()


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "spread": lambda values: values,
    "tied": lambda values: (values * 2).round() / 2,
    "all equal": lambda values: values * 0 + 1.5,
    "near": lambda values: values * 1e-3,
    "far": lambda values: values * 50,
    "mostly masked": lambda values: values.masked_fill(
        torch.arange(values.shape[1], device=DEVICE) % 7 != 0, float("-inf")
    ),
}


@each_backend
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("vocab", [7, 64, 200])
def test_the_set_that_is_drawn_from(
    backend: str, form: str, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A uniform number next to 1 gives the set's last token; one between depends on its mass."""
    from mooncake_kernels.triton import sampling

    monkeypatch.setattr(sampling, "_BLOCK", 64)
    filters = [(3, 1.0, 0.0), (0, 0.6, 0.0), (vocab - 1, 0.97, 0.01)]
    spots = [0.37, 1 - 2**-40]
    one = FORMS[form](logits(1, vocab, seed=vocab))
    top_k, top_p, min_p = ([each[n] for each in filters for _ in spots] for n in range(3))
    rows = len(top_k)
    given = settings(rows, uniform=spots * len(filters), top_k=top_k, top_p=top_p, min_p=min_p)
    values = one.expand(rows, vocab)
    wanted = kernel("draw")(values, given).tolist()
    assert kernel("draw", backend)(values, given).tolist() == wanted


@each_backend
def test_ties_stay_together(backend: str) -> None:
    """Five equal best tokens and top-k 2: all five are drawn from; greedy takes the lowest id."""
    values = torch.full((4, 64), -3.0, device=DEVICE)
    values[:, 10:60:10] = 2.0
    given = settings(4, temperature=[1, 1, 1, 0], uniform=[0.0, 0.5, 0.99, 0.3], top_k=[2] * 4)
    assert kernel("draw", backend)(values, given).tolist() == [10, 30, 50, 10]


@each_backend
def test_masked_tokens_are_never_drawn(backend: str) -> None:
    values = logits(4, 50, seed=3)
    values[:, ::2] = float("-inf")
    given = settings(4, uniform=[0.0, 0.3, 0.6, 1 - 2**-53], top_k=[0, 40, 0, 0])
    tokens = kernel("draw", backend)(values, given)
    assert tokens.tolist() == kernel("draw")(values, given).tolist()
    assert all(token % 2 for token in tokens.tolist())


@each_backend
def test_a_row_does_not_depend_on_its_neighbours(backend: str) -> None:
    given = settings(ROWS, uniform=SPREAD, top_p=[0.9] * ROWS)
    together = kernel("draw", backend)(logits(), given).tolist()
    single = settings(1, uniform=SPREAD[2:3], top_p=[0.9])
    assert kernel("draw", backend)(logits()[2:3], single).tolist() == together[2:3]


@each_backend
def test_penalties(backend: str) -> None:
    generator = torch.Generator().manual_seed(4)
    values = logits(3, 90, seed=5)
    seen = (torch.rand(3, 90, generator=generator) < 0.3).to(DEVICE)
    counts = torch.randint(0, 3, (3, 90), generator=generator, dtype=torch.int32).to(DEVICE)
    penalties = Penalties(
        *torch.tensor([[1.3, 1.0, 0.7], [0.0, 0.5, -0.2], [0.1, 0.0, 0.4]], device=DEVICE)
    )
    got, wanted = values.clone(), values.clone()
    kernel("penalize", backend)(got, seen, counts, penalties)
    kernel("penalize")(wanted, seen, counts, penalties)
    if backend == "native":
        assert torch.equal(got, wanted)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    repeated = torch.where(values[0] > 0, values[0] / 1.3, values[0] * 1.3)
    row = torch.where(seen[0], repeated, values[0]) - 0.1 * counts[0]
    torch.testing.assert_close(got[0], row, rtol=1e-6, atol=1e-6)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda values: values,
    "part of rows": lambda values: torch.cat((values, values), dim=1)[:, : values.shape[1]],
    "columns": lambda values: values.t().contiguous().t(),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@needs_compiled_code
@each_layout
def test_logits_may_lie_in_any_order(layout: str) -> None:
    rows = settings(ROWS, uniform=SPREAD, top_p=[0.9] * ROWS)
    wanted = kernel("draw")(logits(), rows)
    assert torch.equal(kernel("draw", "native")(LAYOUTS[layout](logits()), rows), wanted)


@needs_compiled_code
@each_layout
@pytest.mark.parametrize("most", [1, 20, 700])
def test_the_most_likely_tokens(most: int, layout: str) -> None:
    values = logits(9, 700, seed=6)
    values[7] = (values[7] * 2).round() / 2
    values[8, 5:] = -torch.inf
    tokens = torch.randint(0, 700, (9,), generator=torch.Generator().manual_seed(7))
    found = kernel("most_likely", "native")(LAYOUTS[layout](values), tokens, most)
    wanted = kernel("most_likely")(values, tokens, most)
    assert torch.equal(found.ranks, wanted.ranks)
    assert torch.equal(found.ids[:7], wanted.ids[:7])
    for ours, theirs in ((found.best, wanted.best), (found.own, wanted.own)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    chosen = values.gather(1, found.ids)
    assert torch.equal(chosen, values.topk(most, dim=-1).values), "of those that tie any, each once"
    assert all(len(set(row)) == most for row in found.ids.tolist())
    tied = [tuple(pair) for pair in zip((-chosen[7]).tolist(), found.ids[7].tolist(), strict=True)]
    assert tied == sorted(tied), "the lowest ids first"


@needs_compiled_code
def test_log_probabilities_of_logits_far_apart_and_of_both_zeros() -> None:
    values = torch.tensor([[-1e30, 300.0, 299.0, -1e30, 0.0], [0.0, -0.0, -0.0, 0.0, -5.0]])
    found = kernel("most_likely", "native")(values, torch.tensor([0, 2]), 4)
    exact = values.double().log_softmax(dim=-1)
    torch.testing.assert_close(
        found.best.double(), exact.gather(1, found.ids), rtol=1e-6, atol=1e-6
    )
    assert found.ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3]]
    assert found.ranks.tolist() == [4, 1]


@needs_compiled_code
@pytest.mark.parametrize("vocab", [1, 7, 8, 300, 1793])
def test_masks_of_bits(vocab: int) -> None:
    values = logits(5, vocab, seed=8)
    allowed = torch.randint(0, 256, (5, -(-vocab // 8)), generator=torch.Generator().manual_seed(9))
    ours, theirs = values.clone(), values.clone()
    kernel("mask", "native")(ours, allowed.to(torch.uint8))
    kernel("mask")(theirs, allowed.to(torch.uint8))
    assert torch.equal(ours, theirs)
    for row in range(5):
        for token in range(vocab):
            is_allowed = bool(int(allowed[row, token // 8]) >> token % 8 & 1)
            wanted = float(values[row, token]) if is_allowed else -float("inf")
            assert float(theirs[row, token]) == wanted
