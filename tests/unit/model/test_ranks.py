"""A model cut among ranks gives the logits of one rank, reads its own parts, and sends what the
formula says.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mooncake_kernels.native import build

from mooncake.model.backends import Backends, settle
from mooncake.model.checkpoint.making.convert import convert_checkpoint
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.checkpoint.tensor_cuts import cut_of, tensor_shapes
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.loading import load_model
from tests.support.model.ranks import ThreadRanks
from tests.support.model.tiny_models import (
    CONFIGS,
    CPU,
    forward,
    kv_for,
    ours,
    random_tokens,
    slot,
    source_of,
    truth,
)

MOST = 1e-4
"""Of a log-probability in float32: sums of the ranks' products are rounded in another order."""


def logprobs(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1)


def compare(one: KimiK2, ranks: ThreadRanks, *, exactly: bool = False) -> None:
    """Compare teacher-forced log-probabilities and KV of prompts cut into steps and mixed with
    single tokens, in both forms of attention.
    """
    spec = one.spec
    kv = kv_for(spec)
    prompts = [random_tokens(length, seed=length, vocab_size=spec.vocab_size) for length in (37, 9)]
    # Pages of every home, in no order; one sequence has none in some homes.
    tables = [[3, 40, 17, 60, 5, 33], [20, 21, 22]]
    for rule in (None, lambda new, context: True, lambda new, context: new == 1):
        steps = [
            [slot(0, 0, prompts[0][:20], tables[0]), slot(1, 0, prompts[1][:8], tables[1])],
            [slot(0, 20, prompts[0][20:36], tables[0]), slot(1, 8, prompts[1][8:], tables[1])],
            [slot(0, 36, prompts[0][36:], tables[0]), slot(1, 9, [7], tables[1])],
        ]
        for slots in steps:
            expected = forward(one, kv, slots, whole=True, rule=rule)
            found = ranks.forward(slots, whole=True, rule=rule)
            for sequence, logits in expected.items():
                distance = (logprobs(found[sequence]) - logprobs(logits)).abs().max()
                assert distance == 0 if exactly else distance <= MOST
    if ranks.shape.pp > 1:
        written = [
            (ranks.models[rank].stage.layers, ranks.kv[rank].pages)
            for stage in range(ranks.shape.pp)
            for rank in ranks.shape.ranks_of(stage)[:1]
        ]
        whole = torch.cat([pages[list(layers)] for layers, pages in written])
        torch.testing.assert_close(whole, kv.pages, atol=0 if exactly else 1e-4, rtol=1e-4)
        return
    num_homes = ranks.kv[0].home.num_homes
    for rank, pages in enumerate(ranks.kv):
        held = ranks.kv[rank % num_homes].pages
        assert torch.equal(pages.pages, held), "replicated KV, bit by bit"
    whole = torch.cat([pages.pages for pages in ranks.kv[:num_homes]], dim=1)
    torch.testing.assert_close(whole, kv.pages, atol=1e-4, rtol=1e-4)
    assert (whole.abs().sum((0, 2, 3)) > 0).equal(kv.pages.abs().sum((0, 2, 3)) > 0)


@pytest.mark.parametrize(("num_ranks", "num_homes"), [(2, 1), (4, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_ranks_compute_what_one_rank_does(name: str, num_ranks: int, num_homes: int) -> None:
    # A vocabulary that two and four divide, so that the head is cut.
    source = source_of(truth(name, vocab_size=212))
    compare(ours(source), ThreadRanks(lambda _: source, num_ranks, num_homes=num_homes))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products have the bits of how many threads compute them, and torch gives threads that begin
    later as many as the last test of this process asked for.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_stages_compute_the_bits_of_one_rank(name: str) -> None:
    source = source_of(truth(name, vocab_size=212))
    for num_stages in (2, source.spec.num_hidden_layers):
        compare(ours(source), ThreadRanks(lambda _: source, 1, num_stages=num_stages), exactly=True)


@pytest.mark.parametrize("num_homes", [1, 2])
def test_stages_of_several_ranks(num_homes: int) -> None:
    source = source_of(truth("grouped routing", vocab_size=212))
    ranks = ThreadRanks(lambda _: source, 2, num_homes=num_homes, num_stages=2)
    if num_homes == 1:
        compare(ours(source), ranks)
        return
    one, kv = ours(source), kv_for(source.spec)
    tokens = random_tokens(40, seed=3)
    for begin, stop in ((0, 30), (30, 39), (39, 40)):
        slots = [slot(0, begin, tokens[begin:stop], [3, 40, 17])]
        expected, found = forward(one, kv, slots), ranks.forward(slots)
        assert (logprobs(found[0]) - logprobs(expected[0])).abs().max() <= MOST


def test_a_vocabulary_that_does_not_divide_is_held_whole() -> None:
    source = source_of(truth("plain"))
    assert source.spec.vocab_size % 2
    compare(ours(source), ThreadRanks(lambda _: source, 2))


WIDE = {
    "moe_intermediate_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
    "v_head_dim": 64, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "q_lora_rank": 128,
    "kv_lora_rank": 128, "hidden_size": 256, "num_hidden_layers": 3,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_quantized_experts_are_cut_between_their_blocks(kind: str, tmp_path: Path) -> None:
    plain = init_checkpoint("k2-nano", 5, tmp_path / "plain", overrides=WIDE)
    path = convert_checkpoint(plain, tmp_path / kind, kind)
    one = load_model(Checkpoint.open(path), dtype=torch.float32, device=CPU)
    compare(one, ThreadRanks(lambda _: Checkpoint.open(path), 2))


@pytest.mark.parametrize("kind", [None, "fp8", "int4"])
def test_each_rank_reads_its_own_parts_of_the_files(kind: str | None, tmp_path: Path) -> None:
    """All ranks together read each cut tensor once, and each the whole ones."""
    path = init_checkpoint("k2-nano", 5, tmp_path / "plain", overrides=WIDE)
    if kind is not None:
        path = convert_checkpoint(path, tmp_path / kind, kind)
    files = Checkpoint.open(path)
    spec = files.spec
    cut = whole = 0
    for name in tensor_shapes(spec):
        stored = files.stored_bytes(name) - (16 if f"{name}_shape" in stored_names(files) else 0)
        if cut_of(spec, name, 2) is None:
            whole += stored
        else:
            cut += stored
    ranks = ThreadRanks(lambda _: Checkpoint.open(path), 2)
    for source in ranks.sources:
        assert isinstance(source, Checkpoint)
        assert source.bytes_read == whole + cut // 2
    assert cut > 8 * whole


def test_each_stage_reads_its_own_layers(tmp_path: Path) -> None:
    path = init_checkpoint("k2-nano", 5, tmp_path / "plain", overrides=WIDE)
    files = Checkpoint.open(path)
    every = sum(files.stored_bytes(name) for name in tensor_shapes(files.spec))
    ranks = ThreadRanks(lambda _: Checkpoint.open(path), 1, num_stages=3)
    read = [source.bytes_read for source in ranks.sources if isinstance(source, Checkpoint)]
    assert sum(read) == every
    assert max(read) < every / 2


def test_stages_send_activations_once() -> None:
    """Each of two ranks half of the columns of every row, and one float64."""
    source = source_of(truth("plain", vocab_size=212))
    ranks = ThreadRanks(lambda _: source, 2, num_stages=2)
    rows, each = 5, 4
    ranks.forward([slot(0, 0, random_tokens(rows, seed=1), range(4))])
    sent = [group.traffic.num_bytes for group in ranks.groups]
    assert sent == [0, 0, *[rows * source.spec.hidden_size // 2 * each + 8] * 2]


def stored_names(files: Checkpoint) -> set[str]:
    return set(files._homes)


def test_ranks_send_what_the_formula_says() -> None:
    """A gathered embedding, two sums a layer, and a gathered head of each row that is read."""
    source = source_of(truth("plain", vocab_size=212))
    ranks = ThreadRanks(lambda _: source, 2)
    spec, rows = source.spec, 5
    ranks.forward([slot(0, 0, random_tokens(rows, seed=1), range(4))])
    each = 4
    sums = 2 * (spec.num_hidden_layers - 1) * rows * spec.hidden_size + 2 * spec.hidden_size
    gathers = rows * spec.hidden_size // 2 + spec.vocab_size // 2
    for group in ranks.groups:
        assert group.traffic.num_bytes == each * (sums + gathers)
        assert group.traffic.num_calls == 2 * spec.num_hidden_layers + 2


def test_a_chunk_gathers_its_context_once_a_layer() -> None:
    """Where the KV is shared out: each rank gives the pages that it holds, as many as the rank
    with most. In the last layer the one row that is read asks every rank instead.
    """
    source = source_of(truth("plain", vocab_size=212))
    shared, copied = (ThreadRanks(lambda _: source, 2, num_homes=homes) for homes in (2, 1))
    spec, pages = source.spec, [3, 40, 17, 60, 5]  # 3 of one home, 2 of the other
    tokens = random_tokens(75, seed=1)
    for begin, stop, most in ((0, 40, 2), (40, 75, 3)):
        before = [ranks.groups[0].traffic.num_bytes for ranks in (shared, copied)]
        for ranks in (shared, copied):
            ranks.forward([slot(0, begin, tokens[begin:stop], pages)])
        more, usual = (
            ranks.groups[0].traffic.num_bytes - bytes_before
            for ranks, bytes_before in zip((shared, copied), before, strict=True)
        )
        heads, each = spec.num_attention_heads // 2, 4
        gathered = (spec.num_hidden_layers - 1) * most * 16 * spec.kv_width * each
        asked = heads * spec.kv_width * each + 2 * heads * (spec.kv_lora_rank + 1) * each
        assert more - usual == gathered + asked


def test_one_rank_exchanges_nothing_and_keeps_its_fused_sums() -> None:
    source = source_of(truth("plain"))
    from mooncake.model.parallel.group import Solo

    solo = Solo()
    model = load_model(source, dtype=torch.float32, device=CPU, group=solo)
    slots = [slot(0, 0, random_tokens(9, seed=1), range(4))]
    whole: dict[int, Any] = forward(model, kv_for(source.spec), slots)
    assert torch.equal(whole[0], forward(ours(source), kv_for(source.spec), slots)[0])
    assert solo.traffic.num_calls == 0


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_deterministic_bits_are_those_of_one_rank(name: str, dtype: torch.dtype) -> None:
    """Of two ranks and of four, whatever runs beside, however the prompt is cut."""
    source = source_of(truth(name, vocab_size=212))
    fixed = settle("auto", "auto", CPU, deterministic=True, dtype=dtype)
    tokens, pages = random_tokens(60, seed=6), range(10, 14)

    def steps(run: Any, cuts: list[int], neighbours: bool) -> torch.Tensor:
        found = []
        for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
            slots = [slot(1, begin, tokens[begin:end], pages)]
            if neighbours:
                slots.insert(0, slot(2, begin, random_tokens(end - begin, seed=end), range(4)))
                slots.append(slot(3, 0, [begin + 1, 5, 3], [20]))
            found.append(run(slots)[1])
        return torch.cat(found)

    def alone(backends: Backends | None, like: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        model = load_model(source, dtype=like, device=CPU, backends=backends)
        kv = kv_for(source.spec)
        found = steps(lambda slots: forward(model, kv, slots, whole=True), [47, 58, 59], False)
        return found, kv.pages

    wanted, written = alone(fixed, dtype)
    truth_of_it = alone(None, torch.float32)[0]
    if dtype == torch.float32:
        torch.testing.assert_close(wanted, truth_of_it, atol=2e-4, rtol=0)
    else:  # in some rows rounding moves what experts are chosen, by one library as by the other
        by_library = alone(None, dtype)[0]
        own, its = ((each - truth_of_it).norm(dim=1).median() for each in (wanted, by_library))
        assert own <= 2 * its
    for num_ranks in (1, 2, 4):
        for cuts, neighbours in (([47, 58, 59], False), ([11, 40], True)):
            ranks = ThreadRanks(lambda _: source, num_ranks, dtype, backends=fixed)
            found = steps(partial(ranks.forward, whole=True), cuts, neighbours)
            assert torch.equal(found, wanted)
            for kv in ranks.kv:
                assert torch.equal(kv.pages[:, 10:14], written[:, 10:14])
