"""What steps of Kimi-K2 launch on an H200, whatever is in them: grids that a GPU takes, and kernels
that were compiled before.

No kernel runs: a rank's model has shapes and no numbers, and each launch is noted with its grid and
with what Triton finds compiled code by.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.reference.paged import PagedSpan, paged_span
from mooncake_kernels.reference.paged_batch import PagedBatch
from mooncake_kernels.reference.sampling import DrawSettings, Penalties
from mooncake_kernels.triton import mla_decode, mla_prefill
from mooncake_kernels.tuning import DecodeTile

from mooncake.base import KvLayout, SamplingParams
from mooncake.engine.ranks.step_log import CapturedSizes, Measure
from mooncake.model.backends import Backends
from mooncake.model.compiling import META
from mooncake.model.device import prefill_graphs
from mooncake.model.device.graphs import EagerSteps
from mooncake.model.inputs import build_inputs
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.sampler import Sampler, sampling_ops
from mooncake.model.measuring import measure_memory
from mooncake.model.memory import GpuMemory
from mooncake.model.running.computed_step import capture_steps
from tests.support.engine.fake_runner import sequence_of
from tests.support.kernels import hopper_table
from tests.support.kernels.launch_notes import Launch, noted_launches, variants
from tests.support.kernels.step_launches import model_of
from tests.support.model.tiny_models import slot

HEADS, RANK, ROPE, PAGE = 64, 512, 64, 64
MOST_SEQUENCES, MOST_CONTEXT, MOST_TOKENS = 1024, 262_144, 8192
MOST_OF_GRID = 65_535
"""Of a grid's second and third size; the first may be 2^31 - 1."""

Rows = Sequence[tuple[int, int]]
"""(new tokens, tokens before them) of each sequence of a step."""


def pages_of(tokens: int) -> list[int]:
    return [0] * -(-tokens // PAGE)


def run(model: KimiK2, kv: KvTensors, rows: Rows) -> None:
    """Run a step as it comes."""
    slots = [
        slot(number, before, [1] * new, pages_of(before + new))
        for number, (new, before) in enumerate(rows)
    ]
    inputs = build_inputs(slots, frozenset(), kv.page_shape, model.prefers_absorbed)
    with torch.inference_mode():
        model.logits(model.forward(inputs.to(META), kv))


def pages_for(model: KimiK2, num_pages: int = 4) -> KvTensors:
    layout = KvLayout.for_model(
        model.spec, block_tokens=PAGE, dtype="bfloat16", weights_revision="none"
    )
    return KvTensors.allocate(layout, num_pages, META)


# ---------------------------------------------------------------- compiled once


def spans_of(rows: Rows) -> list[PagedSpan]:
    firsts = itertools.accumulate((new for new, _ in rows), initial=0)
    shape = torch.Size((4, PAGE, RANK + ROPE))
    return [
        paged_span(first, new, before + new, pages_of(before + new), shape)
        for (new, before), first in zip(rows, firsts, strict=False)
    ]


@pytest.mark.parametrize("split_pages", [0, 64])
@pytest.mark.parametrize("tile", [DecodeTile(), DecodeTile(warpgroups=True)])
@pytest.mark.parametrize("heads", [HEADS, HEADS // 8])
def test_decode_is_compiled_once_for_all_batches_and_contexts(
    heads: int, tile: DecodeTile, split_pages: int
) -> None:
    kv = torch.empty(4, PAGE, RANK + ROPE, dtype=torch.bfloat16, device=META)
    with noted_launches() as launches:
        for seqs, width in itertools.product((1, 2, 3, 16, 17, 64, 1000), (1, 2, 15, 16, 4096)):
            batch = PagedBatch(
                *(torch.empty(shape, dtype=torch.int32, device=META)
                  for shape in (seqs + 1, seqs, (seqs, width))), 1,
            )  # fmt: skip
            q = torch.empty(seqs, heads, RANK + ROPE, dtype=torch.bfloat16, device=META)
            mla_decode.mla_decode(q, kv, batch, RANK, split_pages=split_pages, tile=tile)
    assert len(launches) >= 3 * 35
    assert {name: len(found) for name, found in variants(launches).items()} == {
        "_schedule": 1,
        "attend_warpgroups" if tile.warpgroups else "_attend": 1,
        "_combine": 1,
    }


@pytest.mark.parametrize(
    ("tile", "launched"),
    [(DecodeTile(), "attend_warpgroups"), (DecodeTile(2, 32), "_attend")],
)
def test_hopper_is_served_its_own_form_unless_a_tile_is_asked_for(
    tile: DecodeTile, launched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_decode, "compiles_for_hopper", lambda: True)
    kv = torch.empty(4, PAGE, RANK + ROPE, dtype=torch.bfloat16, device=META)
    sizes = ((3,), (2,), (2, 4))
    tables = (torch.empty(size, dtype=torch.int32, device=META) for size in sizes)
    q = torch.empty(2, HEADS, RANK + ROPE, dtype=torch.bfloat16, device=META)
    with noted_launches() as launches:
        mla_decode.mla_decode(q, kv, PagedBatch(*tables, 1), RANK, tile=tile)
    assert [each.kernel for each in launches] == ["_schedule", launched, "_combine"]


def test_spans_are_compiled_once_a_size_of_tiles() -> None:
    """As eager steps have them: one row and many in one step, tables of any length."""
    kv = torch.empty(4, PAGE, RANK + ROPE, dtype=torch.bfloat16, device=META)
    for heads, sizes in ((HEADS, 1), (HEADS // 8, 3)):  # of 16, 32 and 64 rows
        with noted_launches() as launches:
            steps = itertools.product((0, 1, 3, 17), (1, 3, 5, 133), (0, 99, 9999))
            for few, many, before in steps:
                rows = [(1, before)] * few + [(many, before)]
                q = torch.empty(few + many, heads, RANK + ROPE, dtype=torch.bfloat16, device=META)
                kernel("mla_absorbed", "triton")(q, kv, spans_of(rows), RANK)
        assert {name: len(found) for name, found in variants(launches).items()} == {
            "_schedule": sizes, "_attend": sizes, "_combine": sizes,
        }  # fmt: skip


def test_prefill_is_compiled_once_a_size_of_tiles() -> None:
    """Whatever the number of spans, the lengths of their contexts, and of its parts: 16 to 128 rows
    of a tile, results of 2, 4 and 8 parts merged.
    """
    sizes: dict[int, set[object]] = {}
    with noted_launches() as launches:
        for spans, new, before in itertools.product(
            (1, 2, 3), (1, 20, 50, 100, 2048), (0, 7, 5000, 40_000, 99_999, 130_000, 250_000)
        ):
            rows = [(new, before)] * spans
            first = len(launches)
            kv = torch.empty(4, PAGE, RANK + ROPE, dtype=torch.bfloat16, device=META)
            q = torch.empty(spans * new, 8, 192, dtype=torch.bfloat16, device=META)
            up = torch.empty(8, RANK, 128, dtype=torch.bfloat16, device=META)
            kernel("mla_expanded", "triton")(
                q, kv, spans_of(rows), up, up.transpose(1, 2).contiguous()
            )
            size = min(128, max(16, 1 << (new - 1).bit_length()))
            found = variants(launches[first:])["_prefill"]
            assert sizes.setdefault(size, found) == found
    assert sorted(sizes) == [16, 32, 64, mla_prefill._BLOCK_ROWS]
    assert len(variants(launches)["_merge"]) == 3


class NoMeter:
    """Runs what is to be measured."""

    def measure(self, step: Callable[[], None]) -> GpuMemory:
        step()
        return GpuMemory(0, 0, 0)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 8])
@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_once_started_no_step_compiles(kind: str, num_ranks: int, deterministic: bool) -> None:
    """Whatever it computes: the largest decode steps are captured, the rest were measured."""
    model = model_of(kind, 2, 1, num_experts=384, num_ranks=num_ranks, deterministic=deterministic)
    kv = pages_for(model)
    asked = Measure(kv.layout, 1, MOST_TOKENS, 64, MOST_CONTEXT)
    with noted_launches() as known:
        measure_memory(model, NoMeter(), asked)
        capture_steps(model, kv, EagerSteps(), CapturedSizes(64, 4, 256), None)
    with noted_launches() as found:
        for number in (1, 3, 4, 16, 48, 77, 208, 400, 999, 1504, 3000, 5008, 8192):
            run(model, kv, [(number, 0)])
            run(model, kv, [(min(number, 1000), 30 * number)])
        for number in (1, 4, 17, 63):
            run(model, kv, [(1, 999 * number)] * number)
            run(model, kv, [(1, 999 * number)] * number + [(3 * number, 99), (999, 180_000)])
            run(model, kv, [(50, 0), (500, 7)] * number)
    new = {name: len(each - variants(known)[name]) for name, each in variants(found).items()}
    assert not any(new.values()), new


def test_once_tried_out_sampling_compiles_nothing() -> None:
    """Whatever number of sequences there is, and how many of them are penalized."""
    sampler = Sampler(1000, ops=sampling_ops(Backends("triton")))
    with noted_launches() as known:
        sampler.try_out(torch.zeros(64, 1000))
    with noted_launches() as found:
        for rows, penalized in ((1, 1), (2, 2), (3, 0), (5, 3), (7, 6), (64, 33), (64, 64)):
            for row in range(rows):
                penalty = 1.5 if row < penalized else 1.0
                sampling = SamplingParams(repetition_penalty=penalty, temperature=row % 2)
                sampler.start(sequence_of(row, sampling, [1]))
            sampler.begin(torch.zeros(rows, 1000), range(rows))
    assert {name: len(each) for name, each in variants(known).items()} == {
        "_draw": 1, "_penalize": 1
    }  # fmt: skip
    assert variants(found) == variants(known)


def test_products_are_compiled_once_a_size_of_tiles() -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    wide, by_head = empty(256, 512), empty(8, 512, 128)
    codes, factors = empty(256, 512, dtype=torch.float8_e4m3fn), empty(2, 4, dtype=torch.float32)
    calls: dict[str, tuple[Callable[[int], object], int]] = {
        "linear": (lambda rows: kernel("linear", "triton")(empty(rows, 512), wide), 1),
        "heads": (
            lambda rows: kernel("linear_heads", "triton")(empty(rows, 8, 128), by_head, fixed=True),
            1,
        ),
        "fp8": (lambda rows: kernel("linear_fp8", "triton")(empty(rows, 512), codes, factors), 4),
    }  # fmt: skip
    for call, sizes in calls.values():
        with noted_launches() as launches:
            for rows in (1, 3, 16, 17, 32, 33, 64, 65, 100, 256, 777):
                call(rows)
        products = {"_fixed_linear", "_linear"} & set(variants(launches))
        assert [len(variants(launches)[name]) for name in products] == [sizes]


# ---------------------------------------------------------------- grids


def check_grids(launches: Sequence[Launch]) -> None:
    for each in launches:
        first, *others = each.grid
        assert 0 < first < 2**31, each
        assert all(0 < size <= MOST_OF_GRID for size in others), (each.kernel, each.grid)


def captured(model: KimiK2) -> None:
    """Decode of the most sequences, each as long as may be; short prompts beside some."""
    most_pages = MOST_CONTEXT // PAGE
    sizes = CapturedSizes(MOST_SEQUENCES, most_pages, prefill_graphs.MOST_TOKENS)
    capture_steps(model, pages_for(model), EagerSteps(), sizes, None)


def eager(model: KimiK2) -> None:
    """A prompt's last chunk; decode as it comes; the two in one step."""
    kv, one = pages_for(model), (1, MOST_CONTEXT - 1)
    run(model, kv, [(MOST_TOKENS, MOST_CONTEXT - MOST_TOKENS)])
    run(model, kv, [one] * 2)
    new = MOST_TOKENS - MOST_SEQUENCES + 1
    run(model, kv, [(1, 1000)] * (MOST_SEQUENCES - 1) + [(new, MOST_CONTEXT - new)])
    run(model, kv, [(8, 1000)] * MOST_SEQUENCES)


def sampled(model: KimiK2) -> None:
    """A token for each of the most sequences, all penalized."""
    rows, vocab = MOST_SEQUENCES, model.spec.vocab_size

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    one, wide = empty(rows), empty(rows, dtype=torch.float64)
    settings = DrawSettings(one, empty(rows, dtype=torch.int32), wide, wide, wide)
    kernel("draw", "triton")(empty(rows, vocab), settings)
    seen, counts = empty(rows, vocab, dtype=torch.bool), empty(rows, vocab, dtype=torch.int32)
    kernel("penalize", "triton")(empty(rows, vocab), seen, counts, Penalties(one, one, one))


@functools.cache
def launched(kind: str, num_ranks: int, deterministic: bool) -> list[Launch]:
    """Return what steps with the most of everything launch."""
    model = model_of(kind, 2, 1, deterministic=deterministic, num_ranks=num_ranks)
    with noted_launches() as launches:
        for part in (captured, eager, sampled):
            part(model)
    return launches


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 8])
@pytest.mark.parametrize("kind", ["bf16", "int4", "fp8"])
def test_grids_at_1024_sequences_and_262144_tokens(
    kind: str, num_ranks: int, deterministic: bool
) -> None:
    launches = launched(kind, num_ranks, deterministic)
    assert len(launches) > 100
    check_grids(launches)


def test_every_kernel_is_among_them() -> None:
    """Those that no step launches yet, too, at what the most sequences would give them."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    seqs = MOST_SEQUENCES
    tables = ((seqs + 1,), (seqs,), (seqs, MOST_CONTEXT // PAGE))
    batch = PagedBatch(*(empty(*shape, dtype=torch.int32) for shape in tables), max_rows=8)
    q, kv = empty(8 * seqs, HEADS, RANK + ROPE), empty(4, PAGE, RANK + ROPE)
    with noted_launches() as launches:
        for split_pages in (0, 64):
            mla_decode.mla_decode(
                q, kv, batch, RANK, split_pages=split_pages, tile=DecodeTile(warpgroups=True)
            )
    check_grids(launches)
    for each in (("fp8", 8, False), ("int4", 1, True), ("bf16", 1, False)):
        launches += launched(*each)
    compiled = {row["kernel"] for row in hopper_table.kept()["kernels"]}
    assert compiled - {each.kernel for each in launches} == set()
