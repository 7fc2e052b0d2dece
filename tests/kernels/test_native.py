"""Compiled code for the CPU against the references; whole where there is no compiler."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.native import build, measured, packed
from mooncake_kernels.native.glue import prepare_queries
from mooncake_kernels.native.linear import FewRows, FewRowsMlp, takes_all_rows
from mooncake_kernels.native.mla_decode import fits
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.reference.experts import gated
from mooncake_kernels.reference.experts_quantized import widen_int4
from mooncake_kernels.reference.fp8 import widen_blocks
from mooncake_kernels.reference.paged import paged_span
from mooncake_kernels.reference.paged_batch import batch_of_spans
from mooncake_kernels.reference.router import Routing

from mooncake.launch.host import environment
from tests.support.kernels.gates import assert_product
from tests.support.waiting import LONG_S

CPU = torch.device("cpu")
needs_compiled_code = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
needs_avx512 = pytest.mark.skipif(
    build.why_not() is not None or build.isa() is build.AVX2,
    reason=f"compiled without {build.AVX512.name}",
)
needs_tiles = pytest.mark.skipif(
    build.why_not() is not None or build.isa() is not build.AMX,
    reason=f"this CPU or kernel gives no {build.AMX.name}",
)
HIDDEN, INNER, NUM = 192, 128, 6


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def load(tokens: int, choices: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Return x, experts and weights; expert 2 never has a token."""
    scores = random(tokens, NUM, seed=seed)
    scores[:, 2] = -9.0
    weights = torch.softmax(random(tokens, choices, seed=seed + 1), dim=-1)
    x = random(tokens, HIDDEN, seed=seed + 2).bfloat16()
    return x, scores.topk(choices, dim=-1).indices, weights


def of_others(experts: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the choices where another rank has the even experts, and weights that say the same."""
    others = experts % 2 == 0
    return experts.masked_fill(others, -1), weights.masked_fill(others, 0)


def both_ways(layer: Any) -> Iterator[tuple[bool, Any]]:
    """Yield (whether it is compiled code's, the layer) for each way that it has."""
    for limit in (0, 10**6):
        if limit or layer._many is not None:
            layer._few_tokens = limit
            yield bool(limit), layer


@pytest.mark.parametrize("tokens", [1, 2, 5, 7, 13, 40, 230])
@pytest.mark.parametrize("choices", [1, 3])
def test_bf16_experts(isa: build.Isa, tokens: int, choices: int) -> None:
    gate_up = (random(NUM, 2 * INNER, HIDDEN, seed=1) * HIDDEN**-0.5).bfloat16()
    down = (random(NUM, HIDDEN, INNER, seed=2) * INNER**-0.5).bfloat16()
    x, experts, weights = load(tokens, choices, seed=tokens)
    wanted = kernel("experts")(gate_up.float(), down.float())(x.float(), experts, weights)
    for compiled, layer in both_ways(kernel("experts", "native")(gate_up, down)):
        got = layer(x, experts, weights)
        assert got.dtype == torch.bfloat16
        assert_product(got, wanted, gate=1e-5 if compiled else 3e-5)
        mine, of_mine = of_others(experts, weights)
        part = kernel("experts")(gate_up.float(), down.float())(x.float(), experts, of_mine)
        assert_product(layer(x, mine, weights), part, gate=1e-5 if compiled else 3e-5)


def int4(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random words and scales of weights of a shape."""
    *lead, ins = shape
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (*lead, ins // 8), generator=generator)
    scales = torch.rand(*lead, ins // 32, generator=generator) * 0.02 + 0.005
    return words.to(torch.int32), scales.bfloat16()


def fp8(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random codes, of all numbers that there are, and factors of weights of a shape."""
    *lead, outs, ins = shape
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, generator=generator)
    codes[codes & 127 == 127] = 0  # no number
    grid = -(-outs // 128), -(-ins // 128)
    factors = torch.rand(*lead, *grid, generator=generator) * 2e-4 + 1e-4
    return codes.to(torch.uint8).view(torch.float8_e4m3fn), factors


@pytest.mark.parametrize("tokens", [1, 3, 8, 40, 230])
@pytest.mark.parametrize(("kind", "share"), [("int4", 0.3), ("fp8", 0.51)])
@pytest.mark.parametrize("inner", [128, 64])
def test_quantized_experts_stay_so(
    isa: build.Isa, kind: str, share: float, tokens: int, inner: int
) -> None:
    made, widened = (int4, widen_int4) if kind == "int4" else (fp8, widen_blocks)
    gate_up, down = made(NUM, 2, inner, HIDDEN, seed=3), made(NUM, HIDDEN, inner, seed=4)
    x, experts, weights = load(tokens, 3, seed=20 + tokens)
    wide = [widened(values, factors.float())
            for values, factors in (gate_up, down)]  # fmt: skip
    wanted = kernel("experts")(wide[0].flatten(1, 2), wide[1])(x.float(), experts, weights)
    built = kernel(f"experts_{kind}", "native")(*gate_up, *down)
    assert_product(built(x, experts, weights), wanted, gate=1e-5)
    mine, of_mine = of_others(experts, weights)
    part = kernel("experts")(wide[0].flatten(1, 2), wide[1])(x.float(), experts, of_mine)
    assert_product(built(x, mine, weights), part, gate=1e-5)
    kept = [
        part for weight in (built.gate_up, built.down) for part in (weight.codes, weight.scales)
    ]
    in_bf16 = 2 * sum(part.numel() for part in wide)
    assert sum(part.numel() * part.element_size() for part in kept) < share * in_bf16


@pytest.mark.parametrize("rows", [1, 6, 7, 250])
@pytest.mark.parametrize(("outs", "ins"), [(192, 320), (64, 64), (128, 1152)])
def test_fp8_linear(isa: build.Isa, outs: int, ins: int, rows: int) -> None:
    codes, factors = fp8(outs, ins, seed=5)
    x = random(rows, ins, seed=6).bfloat16()
    wanted = x.float() @ widen_blocks(codes, factors).t()
    layer = packed.Fp8Linear(codes, factors)
    add = random(rows, outs, seed=7).bfloat16()
    assert_product(layer(x), wanted, gate=1e-5)
    assert_product(layer(x, add), wanted + add.float(), gate=1e-5)


def test_each_code_is_its_number(isa: build.Isa) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(64, 1)
    codes[codes & 127 == 127] = 0
    values = codes.view(torch.float8_e4m3fn)
    eye = torch.eye(256).bfloat16()
    layer = packed.Fp8Linear(values, torch.full((1, 2), 0.5))
    for rows in (2, 256):
        assert torch.equal(layer(eye[:rows]).float(), values.float().t()[:rows] / 2), rows


@pytest.mark.parametrize("block_tokens", [16, 64])
@pytest.mark.parametrize(
    "layout", [[(1, 1)], [(1, 70), (3, 131), (1, 64)], [(2, 2), (1, 257)], [(40, 300)]]
)
def test_mla_decode(isa: build.Isa, block_tokens: int, layout: list[tuple[int, int]]) -> None:
    heads, rank, rope = 16, 96, 32
    kv = random(80, block_tokens, rank + rope, seed=4).bfloat16()
    kv[0] = float("nan")  # what nobody's table names
    free = (torch.randperm(79, generator=torch.Generator().manual_seed(5)) + 1).tolist()
    spans, row = [], 0
    for rows, context in layout:
        pages = [free.pop() for _ in range(-(-context // block_tokens))]
        kv.view(-1, rank + rope)[pages[-1] * block_tokens :][:block_tokens][
            (context - 1) % block_tokens + 1 :
        ] = float("nan")  # what is not written yet
        spans.append(paged_span(row, rows, context, pages, kv.shape))
        row += rows
    q = (random(row, heads, rank + rope, seed=6) * 0.3).bfloat16()
    batch = batch_of_spans(spans, CPU)
    got, lse = kernel("mla_decode", "native")(q, kv, batch, rank)
    wanted, wanted_lse = kernel("mla_decode")(q, kv.nan_to_num(), batch, rank)
    assert_product(got, wanted, gate=1e-5)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-4, rtol=1e-5)
    whole, same_lse = kernel("mla_decode", "native")(q, kv, batch, rank, out_dtype=torch.float32)
    assert torch.equal(whole.bfloat16(), got), "the same, not rounded yet"
    assert torch.equal(same_lse, lse)
    assert torch.equal(whole, got.float()) == (layout == [(1, 1)]), "one key's is exact"


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_cached_row(isa: build.Isa, rows: int) -> None:
    rank, rope = 96, 32
    joined = random(rows, 24 + rank + rope, seed=9).bfloat16()
    latent, key = joined[:, 24 : 24 + rank], joined[:, 24 + rank :]
    rotation = torch.polar(torch.full((rows, rope // 2), 0.9), random(rows, rope // 2, seed=10))
    norm = (random(rank, seed=11).bfloat16(), 1e-6)
    places = torch.randperm(160, generator=torch.Generator().manual_seed(12))[:rows]
    places[rows // 2] = -1  # an unused row
    pages = [torch.zeros(10, 16, rank + rope, dtype=torch.bfloat16) for _ in range(2)]
    for backend, kv in zip(("native", "reference"), pages, strict=True):
        kernel("kv_write", backend)(latent, key, rotation, places, norm, kv)
    assert_product(*pages, gate=1e-5) if rows > 1 else None
    assert torch.equal(pages[0] == 0, pages[1] == 0), "the same rows and no others"
    wide = [torch.zeros(10, 16, rank + rope) for _ in range(2)]
    for backend, kv in zip(("native", "reference"), wide, strict=True):
        kernel("kv_write", backend)(latent, key, rotation, places, norm, kv)
    assert torch.equal(*wide), "pages of another dtype go to the reference"


@pytest.mark.parametrize("rows", [1, 40])
def test_prepared_queries(isa: build.Isa, rows: int) -> None:
    q = random(rows, 8, 52, seed=13).bfloat16()
    rotation = torch.polar(torch.full((rows, 16), 1.1), random(rows, 16, seed=14))
    wanted = q.clone().mul_(0.07)
    wanted[..., 20:] = kernel("rotate")(wanted[..., 20:], rotation, True)
    prepare_queries(q, rotation, 0.07)
    assert torch.equal(q[..., :20], wanted[..., :20])
    assert_product(q[..., 20:], wanted[..., 20:], gate=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_the_router(isa: build.Isa, rows: int, groups: int, normalize: bool) -> None:
    x, weight = random(rows, 64, seed=15).bfloat16(), random(16, 64, seed=16) * 0.2
    bias = random(16, seed=17) * 0.3
    routing = Routing(3, groups, min(groups, 2), normalize, 2.5)
    found, shares = kernel("route", "native")(x, weight, bias, routing)
    wanted, wanted_shares = kernel("route")(x, weight, bias, routing)
    order, wanted_order = found.argsort(dim=-1), wanted.argsort(dim=-1)
    assert torch.equal(found.gather(1, order), wanted.gather(1, wanted_order))
    torch.testing.assert_close(
        shares.gather(1, order), wanted_shares.gather(1, wanted_order), atol=1e-6, rtol=1e-5
    )


def test_what_compiled_code_does_not_take() -> None:
    assert not build.fits(64, 32)
    assert not fits(4, 576, 512, 64, torch.bfloat16)
    assert not fits(16, 40, 32, 64, torch.bfloat16)
    assert not fits(16, 576, 512, 64, torch.float32)


@needs_compiled_code
def test_experts_of_other_widths_are_refused_with_words() -> None:
    gate_up, down = torch.zeros(2, 64, 48).bfloat16(), torch.zeros(2, 48, 32).bfloat16()
    with pytest.raises(build.CannotBuild, match="widths 48 and 32, not multiples of 64"):
        kernel("experts", "native")(gate_up, down)
    with pytest.raises(build.CannotBuild, match="weights of widths 64 and 32"):
        packed.Fp8Linear(*fp8(64, 32, seed=1))
    with pytest.raises(build.CannotBuild, match=r"experts of torch.float32"):
        kernel("experts", "native")(torch.zeros(1, 128, 64), torch.zeros(1, 64, 64))


@needs_avx512
def test_another_order_of_packed_weights_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random(NUM, 2 * INNER, HIDDEN, seed=1), random(NUM, HIDDEN, INNER, seed=2)
    bf16 = [weight.bfloat16() * 0.1 for weight in weights]
    shared = kernel("experts", "native")(*bf16)
    assert packed.reads_onednn(bf16[0][0])
    assert shared.slot(1)[0].data_ptr() == shared._few._addresses[1]
    monkeypatch.setattr(packed, "_read", {})
    monkeypatch.setattr(onednn, "bytes_of", lambda packed: torch.zeros(1))
    assert takes_all_rows(bf16[0][0])
    own = kernel("experts", "native")(*bf16)
    assert own._few_tokens == math.inf
    args = load(40, 3, seed=1)
    assert torch.equal(own(*args), shared._few(*args))


@needs_avx512
def test_the_choice_is_measured_once_for_a_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_measured", {})
    gate_up = random(4, 128, 64, seed=7).bfloat16()
    down = random(4, 64, 64, seed=8).bfloat16()
    layers = [kernel("experts", "native")(gate_up, down) for _ in range(3)]
    [found] = measured._measured.values()
    assert found == measured.timings()
    assert found[0].tokens == 1
    won = [timing.tokens for timing in found if timing.won]
    any_number = build.isa() is build.AMX and len(won) == len(found)
    assert {layer._few_tokens for layer in layers} == {
        math.inf if any_number else max(won, default=0)
    }


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[int, int]]:
    """Returns, as a process that starts would see it with so many threads: the limit, and how many
    times it ran the layer to find it. Compiled code wins below 32 tokens there.
    """
    monkeypatch.setattr(build, "_kept_in", [tmp_path])
    monkeypatch.setattr(build, "cpu_flags", lambda: build.AVX512.needed)
    monkeypatch.setattr(measured.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(measured.time, "process_time", lambda: clock[0])
    clock = [0.0]

    def start(threads: int) -> tuple[int, int]:
        monkeypatch.setattr(measured, "_measured", {})
        monkeypatch.setattr(measured.torch, "get_num_threads", lambda: threads)
        runs = []

        def takes(of: Callable[[int], float]) -> measured.Experts:
            def run(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
                runs.append(x.shape[0])
                clock[0] += of(x.shape[0])
                return x

            return run

        few, many = takes(lambda rows: rows / 1e6), takes(lambda rows: 1e-5 + rows / 2e6)
        return measured.few_tokens(("layer", 2, 64, 64), few, many), len(runs)

    return start


def test_what_was_measured_is_kept_for_the_same_machine(
    timed: Callable[[int], tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, runs = timed(2)
    assert (limit, runs > 0) == (8, True)
    assert timed(2) == (8, 0), "read, not measured"
    assert timed(1)[1] == runs, "another number of threads"
    monkeypatch.setattr(build, "cpu_name", lambda: "another CPU")
    assert timed(2)[1] == runs


@pytest.mark.parametrize(
    "stored", ["", "[]", '{"a": 1}', '{"a": [[1, 2]]}', '{"a": [["k", "x", 1, 1]]}']
)
def test_a_damaged_file_of_timings_is_measured_anew(
    stored: str, timed: Callable[[int], tuple[int, int]], tmp_path: Path
) -> None:
    (tmp_path / "timings.json").write_text(stored)
    assert timed(2)[1] > 0
    assert timed(2)[1] == 0


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and nothing loaded."""
    monkeypatch.setattr(build, "_kept_in", [tmp_path / "mooncake"])
    monkeypatch.setattr(build, "_tried", build._tried.__wrapped__)
    monkeypatch.setattr(build, "cpu_flags", lambda: build.AVX512.needed)
    return tmp_path / "mooncake"


def test_no_compiler_is_said_so(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(build.CannotBuild, match="no C\\+\\+ compiler: install g\\+\\+"):
        build.code()
    assert not list(fresh.iterdir())
    assert build.unlikely() == build.why_not()


def test_another_cpu_is_said_so(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"avx2", "avx512f"}))
    with pytest.raises(build.CannotBuild, match="this CPU has no f16c, fma"):
        build.code()
    assert build.unlikely() == build.why_not()


def test_instructions_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = build.AMX.needed | build.AVX2.needed
    for flags, permitted, wanted in (
        (everything, True, build.AMX),
        (everything, False, build.AVX512),
        (build.AVX512.needed, True, build.AVX512),
        (everything - {"avx512_bf16"}, True, build.AVX2),
    ):
        monkeypatch.setattr(build, "cpu_flags", lambda flags=flags: flags)
        monkeypatch.setattr(build, "_tiles_permitted", lambda permitted=permitted: permitted)
        assert build.isa() is wanted
        assert build.has_amx() == (permitted and "amx_bf16" in flags)


def test_instructions_are_no_more_than_onednn_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = build.AMX.needed | build.AVX2.needed
    monkeypatch.setattr(build, "cpu_flags", lambda: everything)
    monkeypatch.setattr(build, "_tiles_permitted", lambda: True)
    monkeypatch.setattr(build, "_limit", [])
    for limit, wanted, amx in (
        ("AVX512_CORE_AMX", build.AMX, True),
        (None, build.AMX, True),
        ("no such name", build.AMX, True),
        ("avx512_core_bf16", build.AVX512, False),
        ("AVX512_CORE", build.AVX2, False),
        ("AVX2", build.AVX2, False),
    ):
        build.limit_to(limit)
        assert (build.isa(), build.has_amx()) == (wanted, amx), limit
    build.limit_to("SSE41")
    with pytest.raises(build.CannotBuild, match="this CPU has no avx2, f16c, fma"):
        build.isa()


def compiler(folder: Path, *lines: str) -> str:
    """Return a compiler that runs `lines`."""
    program = folder / "c++"
    program.write_text("\n".join(["#!/bin/sh", *lines]))
    program.chmod(0o700)
    return str(program)


def test_a_failing_compiler_leaves_nothing(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = compiler(tmp_path, "echo 'tiles.h: what is this?' >&2", "exit 1")
    monkeypatch.setattr(build.shutil, "which", lambda name: failing)
    with pytest.raises(build.CannotBuild, match="failed: tiles"):
        build.code()
    assert not list(fresh.iterdir())


def test_a_slow_compiler_is_told_of_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed after two minutes, so each worker of a slow machine tried it anew."""
    go_on, told = tmp_path / "go on", list[str]()
    os.mkfifo(go_on)

    def info(*words: object) -> None:
        told.append(str(words[0]) % words[1:])
        if len(told) == 2:
            go_on.write_text("")

    monkeypatch.setattr(build, "_TELL_S", 0.01)
    monkeypatch.setattr(build._log, "info", info)
    build._run(compiler(tmp_path, f"read line < '{go_on}'", "exit 0"), "experts.cpp.o")
    assert "for experts.cpp.o so far; a start waits for it" in told[-1]


@needs_compiled_code
def test_what_is_compiled_is_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_FLAGS", ("-O0", *build._FLAGS[1:]))  # in half the time
    assert build.unlikely(fresh) is None
    assert not fresh.exists(), "asking compiles nothing"
    build.code()
    [kept] = fresh.iterdir()
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert build.unlikely(fresh) is None
    assert build.unlikely() is not None
    build.code()
    assert list(fresh.iterdir()) == [kept]


def test_of_those_that_start_at_once_one_compiles(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    compiled: list[Path] = []

    def compile_slowly(target: Path, wanted: build.Isa) -> None:
        begun.set()
        assert may_end.wait(LONG_S)
        compiled.append(target)
        target.write_text("code")

    monkeypatch.setattr(build, "_compile", compile_slowly)
    monkeypatch.setattr(build.ctypes, "CDLL", str)
    with ThreadPoolExecutor() as threads:
        each = [threads.submit(build._loaded, build.isa()) for _ in range(3)]
        assert begun.wait(LONG_S)
        may_end.set()
        said = sorted(one.result(LONG_S)[1] for one in each)
    [file] = compiled
    assert file.parent == fresh
    assert said == ["compiled now", *[f"kept as {file}"] * 2]


def test_where_folders_are_not_locked_each_compiles(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.EBADF, "as NFS says of what is not open for writing")

    monkeypatch.setattr(build.fcntl, "flock", refuse)
    monkeypatch.setattr(build, "_compile", lambda target, wanted: target.write_text("code"))
    monkeypatch.setattr(build.ctypes, "CDLL", str)
    assert build._loaded(build.isa())[1] == "compiled now"


def test_a_lock_ends_with_the_compiling_though_a_fork_has_its_descriptor(tmp_path: Path) -> None:
    with build._alone(tmp_path):
        copies = [
            os.dup(int(each)) for each in os.listdir("/proc/self/fd") if leads(each, tmp_path)
        ]
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        assert copies
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        for each in (other, *copies):
            os.close(each)


def leads(descriptor: str, folder: Path) -> bool:
    """Whether a descriptor of this process is of `folder`."""
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")) == folder
    except OSError:
        return False


@needs_compiled_code
def test_code_that_is_shipped_is_loaded_where_it_fits_and_else_the_reason_names_it(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "compiled"
    shipped.mkdir()
    file = build._kept(shipped, build.isa())
    made = build._kept(environment.cache_dir(), build.isa())
    if made.exists():  # the code of the other tests here: to compile it takes ten seconds
        shutil.copy(made, file)
    else:
        build._compile(file, build.isa())
    monkeypatch.setattr(build, "COMPILED", shipped)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert build.unlikely() is None
    build.code()
    assert build.used() == f"shipped as {file}, for {build.isa().name}"
    assert not fresh.exists(), "nothing is compiled or kept"
    file.rename(other := shipped / "native-0123456789abcdef.so")
    problem = rf"install g\+\+ .*other sources or instructions: {other.name}"
    with pytest.raises(build.CannotBuild, match=problem):
        build.code()
    assert build.used().startswith("none, and libraries compute instead: there is no C++ compiler")


def test_code_is_looked_for_in_the_compile_cache_unless_others_can_write_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "COMPILED", tmp_path / "none shipped")
    cache = tmp_path / "cache"
    cache.mkdir()
    try:
        build.look_in(str(cache))
        assert not build.is_made()
        file = build._kept(cache, build.isa())
        file.write_bytes(b"")
        assert build.is_made()
        file.chmod(0o666)
        build.look_in(str(cache))
        assert not build.is_made()
        assert f"{cache} is not used: others may write to {file}" in caplog.text
        file.chmod(0o644)
        link = tmp_path / "link"
        link.symlink_to(cache)
        build.look_in(str(link))
        link.unlink()
        link.symlink_to(tmp_path)
        assert build.is_made(), "it reads what was checked, wherever the link points to now"
    finally:
        build.look_in(None)
    assert not build.is_made()


def test_code_of_the_compile_cache_that_cannot_be_loaded_is_compiled_here(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "COMPILED", tmp_path / "none shipped")
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    cache = tmp_path / "cache"
    cache.mkdir()
    file = build._kept(cache, build.isa())
    file.write_bytes(b"no code")
    try:
        build.look_in(str(cache))
        with pytest.raises(build.CannotBuild, match="no C\\+\\+ compiler"):
            build.code()
    finally:
        build.look_in(None)
    assert f"{file} cannot be loaded, so it is compiled here" in caplog.text


def test_a_folder_that_others_can_write_to_is_not_trusted(fresh: Path) -> None:
    fresh.mkdir()
    fresh.chmod(0o777)
    with pytest.raises(build.CannotBuild, match="others may write to"):
        build.code()


@needs_compiled_code
@pytest.mark.parametrize("width", [96, 100, 7])
@pytest.mark.parametrize("rows", [1, 40])
def test_norms(rows: int, width: int) -> None:
    joined, weight = random(rows, width + 8, seed=30).bfloat16(), random(width, seed=31).bfloat16()
    x = joined[:, 8:]
    wanted = kernel("rms_norm")(x, weight, 1e-5)
    assert_product(kernel("rms_norm", "native")(x, weight, 1e-5), wanted, gate=1e-5)
    wide = kernel("rms_norm", "native")(x.float(), weight.float(), 1e-5)
    assert torch.equal(wide, kernel("rms_norm")(x.float(), weight.float(), 1e-5))


def few_rows(outs: int, ins: int, seed: int) -> tuple[torch.Tensor, FewRows]:
    weight = (random(outs, ins, seed=seed) * ins**-0.5).bfloat16()
    packed = None if takes_all_rows(weight) else onednn.pack(weight)
    made = FewRows(weight, packed)
    made.kept = packed
    assert packed is not None or made.most == math.inf, "tiles may take all rows beside oneDNN, too"
    return weight, made


@pytest.mark.parametrize("rows", [0, 1, 2, 6, 7, 13, 100, 1100])
def test_products_of_few_rows(isa: build.Isa, rows: int) -> None:
    weight, few = few_rows(192, 128, seed=32)
    joined, add = random(rows, 192, seed=33).bfloat16(), random(rows, 192, seed=34).bfloat16()
    x = joined[:, 64:]
    wanted = x.float() @ weight.float().T
    assert_product(few(x), wanted, gate=1e-5)
    assert_product(few(x, add), wanted + add.float(), gate=1e-5)
    wide = few(x, wide=True)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [0, 1, 5, 13, 100])
def test_a_gated_layer_of_few_rows(isa: build.Isa, rows: int) -> None:
    gate_up, first = few_rows(2 * INNER, HIDDEN, seed=35)
    down, second = few_rows(HIDDEN, INNER, seed=36)
    x, to = random(rows, HIDDEN, seed=37).bfloat16(), random(rows, HIDDEN, seed=38).bfloat16()
    wanted = gated(x.float() @ gate_up.float().T) @ down.float().T
    layer = FewRowsMlp(first, second, lambda x: x)
    assert_product(layer(x, to), wanted + to.float(), gate=1e-5)


@pytest.mark.parametrize("rows", [1, 13, 100])
def test_a_gated_layer_of_fp8(isa: build.Isa, rows: int) -> None:
    gate_up, down = fp8(256, HIDDEN, seed=35), fp8(HIDDEN, 128, seed=36)
    x, to = random(rows, HIDDEN, seed=37).bfloat16(), random(rows, HIDDEN, seed=38).bfloat16()
    wanted = gated(x.float() @ widen_blocks(*gate_up).T) @ widen_blocks(*down).T
    layer = FewRowsMlp(packed.Fp8Linear(*gate_up), packed.Fp8Linear(*down), lambda x: x)
    assert_product(layer(x, to), wanted + to.float(), gate=1e-5)


@needs_avx512
def test_products_of_odd_widths_are_left_to_the_library() -> None:
    for outs, ins in ((48, 64), (64, 48)):
        with pytest.raises(build.CannotBuild):
            few_rows(outs, ins, seed=39)


@needs_tiles
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(
    "layout", [[(1, 1)], [(3, 3), (33, 97), (32, 64)], [(70, 1100)], [(257, 257), (2, 300)]]
)
def test_expanded_attention_by_tiles(heads: int, layout: list[tuple[int, int]]) -> None:
    rank, nope, rope, value, block_tokens = 64, 96, 32, 64, 16
    kv = (random(100, block_tokens, rank + rope, seed=60)).bfloat16()
    kv[0] = float("nan")  # what nobody's table names
    free = (torch.randperm(99, generator=torch.Generator().manual_seed(61)) + 1).tolist()
    spans, row = [], 0
    for rows, context in layout:
        pages = [free.pop() for _ in range(-(-context // block_tokens))]
        kv.view(-1, rank + rope)[pages[-1] * block_tokens :][:block_tokens][
            (context - 1) % block_tokens + 1 :
        ] = float("nan")  # what is not written yet
        spans.append(paged_span(row, rows, context, pages, kv.shape))
        row += rows
    q = (random(row, heads, nope + rope, seed=62) * 0.3).bfloat16()
    up = (
        (random(heads, rank, nope, seed=63) * rank**-0.5).bfloat16(),
        (random(heads, value, rank, seed=64) * rank**-0.5).bfloat16(),
    )
    got = kernel("mla_expanded", "native")(q, kv, spans, *up)
    wide = [part.float() for part in (q, kv.nan_to_num(), *up)]
    wanted = kernel("mla_expanded")(*wide[:2], spans, *wide[2:])
    assert got.dtype == torch.bfloat16
    assert_product(got, wanted, gate=2e-5)


@needs_tiles
def test_the_first_row_of_a_prompt_sees_one_key_by_tiles() -> None:
    """Its values are exactly those of this key, whatever the scores of later ones."""
    kv = random(4, 16, 64, seed=65).bfloat16()
    kv.view(-1, 64)[1:] *= 50
    span = paged_span(0, 40, 40, [0, 1, 2], kv.shape)
    q = random(40, 2, 64, seed=66).bfloat16()
    up = random(2, 32, 32, seed=67).bfloat16(), random(2, 64, 32, seed=68).bfloat16()
    got = kernel("mla_expanded", "native")(q, kv, [span], *up)
    value = (kv[0, 0, :32].float() @ up[1].float().transpose(1, 2)).bfloat16()
    torch.testing.assert_close(got[0], value, atol=0, rtol=0.01)
