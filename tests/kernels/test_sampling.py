"""Drawing without a sort against the definition with one, and against the engine's own sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.reference.sampling import DrawSettings, Penalties

from mooncake.model.layers import sampling_math
from tests.support.kernels.gates import DEVICE

ROWS, VOCAB = 6, 300


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
def test_same_tokens_as_the_definition(given: dict[str, list[float]]) -> None:
    rows = settings(ROWS, uniform=SPREAD, **given)
    got = kernel("draw", "triton")(logits(), rows)
    assert got.tolist() == kernel("draw")(logits(), rows).tolist()


def test_the_definition_is_the_engines_own() -> None:
    """Where the engine draws on the CPU today: the same settings give the same tokens."""
    given = settings(
        ROWS, temperature=[0.5, 1, 1, 2, 1, 0.8], uniform=SPREAD, top_k=[0, 4, 0, 30, 7, 0],
        top_p=[1, 0.9, 0.6, 0.95, 1, 0.2], min_p=[0, 0, 0.01, 0, 0.1, 0],
    )  # fmt: skip
    engines = sampling_math.DrawSettings(
        *(
            getattr(given, name)[:, None]
            for name in ("temperature", "top_k", "top_p", "min_p", "uniform")
        )
    )
    engines = sampling_math.DrawSettings(
        engines.temperature, engines.top_k.long(), engines.top_p, engines.min_p, engines.uniform
    )
    wanted = sampling_math.draw(logits(seed=1), engines).tolist()
    assert kernel("draw")(logits(seed=1), given).tolist() == wanted
    assert kernel("draw", "triton")(logits(seed=1), given).tolist() == wanted


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("vocab", [7, 64, 200])
def test_the_set_that_is_drawn_from(form: str, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert kernel("draw", "triton")(values, given).tolist() == wanted


def test_ties_stay_together() -> None:
    """Five equal best tokens and top-k 2: all five are drawn from; greedy takes the lowest id."""
    values = torch.full((4, 64), -3.0, device=DEVICE)
    values[:, 10:60:10] = 2.0
    given = settings(4, temperature=[1, 1, 1, 0], uniform=[0.0, 0.5, 0.99, 0.3], top_k=[2] * 4)
    assert kernel("draw", "triton")(values, given).tolist() == [10, 30, 50, 10]


def test_masked_tokens_are_never_drawn() -> None:
    values = logits(4, 50, seed=3)
    values[:, ::2] = float("-inf")
    given = settings(4, uniform=[0.0, 0.3, 0.6, 1 - 2**-53], top_k=[0, 40, 0, 0])
    tokens = kernel("draw", "triton")(values, given)
    assert tokens.tolist() == kernel("draw")(values, given).tolist()
    assert all(token % 2 for token in tokens.tolist())


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    given = settings(ROWS, uniform=SPREAD, top_p=[0.9] * ROWS)
    together = kernel("draw", "triton")(logits(), given).tolist()
    single = settings(1, uniform=SPREAD[2:3], top_p=[0.9])
    assert kernel("draw", "triton")(logits()[2:3], single).tolist() == together[2:3]


def test_penalties() -> None:
    generator = torch.Generator().manual_seed(4)
    values = logits(3, 90, seed=5)
    seen = (torch.rand(3, 90, generator=generator) < 0.3).to(DEVICE)
    counts = torch.randint(0, 3, (3, 90), generator=generator, dtype=torch.int32).to(DEVICE)
    penalties = Penalties(
        *torch.tensor([[1.3, 1.0, 0.7], [0.0, 0.5, -0.2], [0.1, 0.0, 0.4]], device=DEVICE)
    )
    got, wanted = values.clone(), values.clone()
    kernel("penalize", "triton")(got, seen, counts, penalties)
    kernel("penalize")(wanted, seen, counts, penalties)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    repeated = torch.where(values[0] > 0, values[0] / 1.3, values[0] * 1.3)
    row = torch.where(seen[0], repeated, values[0]) - 0.1 * counts[0]
    torch.testing.assert_close(got[0], row, rtol=1e-6, atol=1e-6)
