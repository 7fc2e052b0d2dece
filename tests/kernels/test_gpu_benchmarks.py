"""The GPU's benchmarks, every line of them, on tiny shapes: nothing may break at first contact."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mooncake_kernels.tuning import TABLES
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import attention, correctness, estimate, host_time, measure, predict
from benchmarks.gpu.__main__ import CASES, main
from benchmarks.gpu.rank_slice import KIMI_K2, step_bytes, whole_spec
from benchmarks.gpu.work import Bench, Case, Work

SAME_CODE = {
    "mla-decode-b32", "mla-decode-b1", "mla-decode-dcp8",
    "moe-int4-1", "moe-int4-64", "moe-int4-128",
}  # fmt: skip
"""Other numbers of what another line runs too."""


@pytest.fixture(scope="module")
def bench() -> Bench:
    return measure.open_bench(tiny=True)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name not in SAME_CODE], ids=lambda case: case.name
)
def test_every_line_runs_and_is_right(case: Case, bench: Bench) -> None:
    row = measure.measured(case, bench)
    assert row["difference"] <= row["gate"]
    assert row["verdict"] in ("aim", "must", "missed")
    assert row["seconds"] > 0
    assert row["bytes"] > 0
    json.dumps(row)
    if case.unit == "TFLOP/s":
        assert row["value"] == pytest.approx(row["tflop_s"])
        assert all(isinstance(value, float | str) for value in row["peers"].values())


def test_what_is_wrong_is_not_timed(bench: Bench) -> None:
    def timer(function: Callable[[], object]) -> float:
        raise AssertionError("timed")

    wrong = Work(lambda: None, 1, 1, lambda: float("nan"), gate=1.0)
    row = measure.measured(
        Case("x", "x", "us", 1, 1, lambda bench: wrong),
        Bench(bench.device, timer, True, 1e9),
    )
    assert row["verdict"] == "WRONG"


def test_verdicts() -> None:
    less, more = (
        Case("x", "x", unit, 2, a, lambda _: None) for unit, a in (("us", 1), ("TFLOP/s", 3))
    )
    assert [less.verdict(value) for value in (0.9, 1.5, 2.1)] == ["aim", "must", "missed"]
    assert [more.verdict(value) for value in (3.1, 2.5, 1.9)] == ["aim", "must", "missed"]
    assert less.value(3e-6, 0) == pytest.approx(3)
    assert more.value(2.0, 6 * 10**12) == pytest.approx(3)


def test_one_command_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = correctness.Finding("an op as its reference", False, "differs by 1")
    looks: list[str] = []

    def ops(bench: Bench) -> Iterator[correctness.Finding]:
        looks.append("ops")
        yield finding

    monkeypatch.setattr(correctness, "findings", ops)
    monkeypatch.setattr(correctness, "engine", lambda bench, path: looks.append("engine") or [])

    def broken(bench: Bench) -> Work:
        raise RuntimeError("does not compile")

    router = next(case for case in CASES if case.name == "router")
    cases = [router, Case("broken", "a broken one", "us", 1, 1, broken)]
    monkeypatch.setattr(command, "CASES", cases)
    run = ["--tiny", "--out", str(tmp_path)]
    assert main([*run, "--seconds", "0"]) == 1
    assert "out of time" in capsys.readouterr().out
    assert main([*run, "--tune"]) == 1
    shown = capsys.readouterr().out
    assert "ops: WRONG before: an op as its reference: differs by 1" in shown
    assert "broken: RuntimeError: does not compile FAILED" in shown
    assert "output tok/s" in shown
    assert looks == ["ops", "engine"], "with the same code nothing is looked at again"
    saved = json.loads((tmp_path / "tiny.json").read_text())
    assert saved["ops"]["verdict"] == "WRONG"
    assert saved["router"]["value"] > 0
    (made,) = tmp_path.glob("*.triton-*")
    assert made.name not in [path.name for path in TABLES.glob("*")]
    # Once more: the tuned table and the router stand; what failed is tried with other code only.
    monkeypatch.setattr(command, "tune_experts", broken)
    saved["router"]["value"] = -1.0
    (tmp_path / "tiny.json").write_text(json.dumps(saved))
    assert main([*run, "--tune"]) == 1
    again = json.loads((tmp_path / "tiny.json").read_text())
    assert again["router"]["value"] == -1.0
    monkeypatch.setattr(measure, "code_digest", lambda: "other code")
    assert main(run) == 1
    assert looks == ["ops", "engine", "ops"], "what was right is not looked at again"
    assert main([*run, "router"]) == 0
    assert json.loads((tmp_path / "tiny.json").read_text())["router"]["value"] > 0
    with pytest.raises(SystemExit):
        main([*run, "no-such-line"])


def test_what_was_right_is_not_looked_at_again(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = replace(bench, device=torch.device("cpu"), tiny=False)
    results, run = measure.Results(tmp_path / "results.json"), list[str]()
    for name in ("ops", "engine"):
        results.put(name, {"verdict": "ok"})

    def tests() -> correctness.Finding:
        run.append("tests")
        return correctness.Finding("tests compiled", len(run) > 1, "")

    monkeypatch.setattr(correctness, "tests", tests)
    command._check(on_gpu, results)
    command._check(on_gpu, results)
    assert results.bad("tests")
    assert len(run) == 1, "five minutes of an hour on a GPU, for what is known"
    monkeypatch.setattr(measure, "code_digest", lambda: "mended")
    mended = measure.Results(tmp_path / "results.json")
    for _ in range(2):
        command._check(on_gpu, mended)
    assert len(run) == 2
    assert not mended.bad("tests")


def test_the_tests_to_be_compiled_are_there() -> None:
    assert [name for name in correctness.TESTS if not (correctness.ROOT / name).exists()] == []


@pytest.mark.parametrize("name", ["prefill-8k", "grouped-down"])
def test_what_others_need_first_is_not_timed_with_them(name: str, bench: Bench) -> None:
    """Their inputs are made by the first call."""
    [case] = [case for case in CASES if case.name == name]
    for peer in case.make(bench).peers.values():
        with suppress(Exception):  # not all of it runs without a GPU
            peer()
        with Creations() as made, suppress(Exception):
            peer()
        assert made.names == []


class Creations(TorchDispatchMode):
    """Notes what copies or fills whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in ("ones", "cat", "clone", "fill_"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_findings_name_every_op(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: correctness.OPS[name] for name in ("rms_norm", "choose", "mask")}
    monkeypatch.setattr(correctness, "OPS", few)
    monkeypatch.setattr("mooncake_kernels.checks.ops", lambda: list(few))
    found = list(correctness.findings(bench))
    assert sorted(each.what for each in found) == [
        "choose as its reference", "choose twice", "mla_decode alone and in a batch",
        "rms_norm as its reference", "rms_norm twice",
    ]  # fmt: skip
    assert all(each.right for each in found)


def test_the_engine_is_looked_at(bench: Bench, tmp_path: Path) -> None:
    found = list(correctness.engine(bench, tmp_path / "c"))
    assert len(found) == 4
    assert [each for each in found if not each.right] == []


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "local_device", lambda: (torch.device("cpu"), "this CPU"))
    with pytest.raises(SystemExit, match="--tiny"):
        measure.open_bench(tiny=False)


def test_floors_are_those_of_the_arithmetic() -> None:
    """The issue's floors, at 4.3 TB/s, from the shapes alone."""
    spec = whole_spec(tiny=False)
    assert step_bytes(spec, 1, 4096) / 4.3e12 * 1e3 == pytest.approx(1.45, abs=0.03)
    assert step_bytes(spec, 64, 512) / 4.3e12 * 1e3 == pytest.approx(13.9, abs=0.2)
    assert KIMI_K2["num_attention_heads"] == attention.HEADS


def test_the_estimate_says_what_it_stands_on() -> None:
    rows: dict[str, Any] = {}
    guessed = estimate.estimate(estimate.assumptions(rows))
    rows["slice-b64-dcp8"] = {"value": 18.0, "device": "NVIDIA H200", "copy_tb_s": 4.2}
    rows["prefill-8k"] = {"value": 1.0, "device": "interpreter"}
    given = estimate.assumptions(rows)
    assert given["step"].source == "measured, slice-b64-dcp8"
    assert given["attention"].value == 474
    # By hand: 60 * 487.2 + 61 * 44.3 us, and 3.7 GB at 3.67 TB/s.
    assert estimate.assumptions({})["step"].value == pytest.approx(29.23 + 2.70 + 1.01, abs=0.06)
    assert given["copy"].value == 4.2
    found = estimate.estimate(given)
    assert found.out_tok_s > guessed.out_tok_s
    # By hand: 18 + 64 * 768 * 70272 B / 4.2 TB/s + 4.2 + 2.4 ms a step.
    assert found.step_ms == pytest.approx(18 + 0.822 + 6.6, abs=0.01)
    by_hand = 1 / (found.step_ms / 1e3 / 64 + 2 / found.prompt_tok_s)
    assert found.out_tok_s == pytest.approx(by_hand)
    # vLLM computed (10,462.57 - 485.78) / 485.78 prompt tokens for each output token.
    mixed = 1 / (found.step_ms / 1e3 / 64 + 20.54 / found.prompt_tok_s)
    assert found.at_mix(20.54) == pytest.approx(mixed)
    row = f"| 8 x H200, TP8 | 20.5 | 486 output tok/s | {mixed:,.0f} output tok/s |"
    assert row in estimate.lines(rows)
    one = estimate.estimate_one(given)
    # By hand: 109.8 experts of 60 layers from DRAM; other weights and KV from the GPU's memory.
    routed, other = 60 * 109.8 * 24.77e6 / 0.5e12, 23.4e9 + 16 * 10240 * 70272
    assert one.step_ms == pytest.approx((routed + other / 4.2e12) * 1e3, rel=1e-3)
    assert 1 / one.prompt_tok_s == pytest.approx(
        42.28e9 / 20e12 + (63.4 - 42.28) / 387e3 + 10.2 / 474e3, rel=1e-3
    )
    sixteen = estimate.estimate_sharing(given)
    # By hand: 24 experts of 60 layers, other weights and KV at three quarters; 18.8 ms of sends.
    step = (60 * 24 * 24.77e6 + 23.4e9 + 64 * 10240 * 70272) / (0.75 * 4.2e12) * 1e3
    assert sixteen.step_ms == pytest.approx(step + 18.78)
    each_s = sixteen.step_ms / 1e3 / 64 + 2 * 16 / sixteen.prompt_tok_s
    assert sixteen.out_tok_s == pytest.approx(16 / each_s)
    assert one.out_tok_s < found.out_tok_s < sixteen.out_tok_s
    text = "\n".join(estimate.lines(rows))
    assert "measured, slice-b64-dcp8" in text


def test_the_hosts_part_of_steps_is_measured() -> None:
    assert len(host_time.step_ms(2, 70, 5)) == 4


def test_the_readme_shows_the_estimates() -> None:
    """As they are without a run of one's own."""
    shown = (Path(predict.__file__).parent / "README.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in estimate.lines({}) if line not in shown] == []


def test_predictions_follow_from_instructions_and_bytes() -> None:
    code = {"launch": "a", "kernel": "k", "instructions": 300, "loop": 100, "warps": 8}
    full = predict.Part("a", "k", items=264, steps=9, num_bytes=4.3e6)
    found = predict.predict([full], 3, [code])
    # By hand: two items a multiprocessor, (200 + 900) * 8 / 4 cycles each.
    assert found.issue_s == pytest.approx(2 * 2200 / 1.755e9)
    assert found.memory_s == pytest.approx(1e-6)
    assert found.whole_s == pytest.approx(found.issue_s + 3e-6)
    odd = predict.predict([replace(full, items=265)], 0, [code])
    assert odd.issue_s == pytest.approx(3 * 2200 / 1.755e9), "one multiprocessor has three"
    even = predict.predict([replace(full, items=330, even=True)], 0, [code])
    assert even.issue_s == pytest.approx(2.5 * 2200 / 1.755e9)
    alone = predict.predict([replace(full, items=1)], 0, [code])
    assert alone.memory_s == pytest.approx(132e-6), "one multiprocessor has its share of bandwidth"
    assert alone.whole_s == alone.memory_s
    dense = predict.predict([replace(full, tensor_s=1.0)], 0, [code])
    assert (dense.tensor_s, dense.whole_s) == (1.0, 1.0)
    few = predict.predict([replace(full, items=132)], 0, [{**code, "warps": 4}])
    assert few.issue_s == pytest.approx(1100 / 1.755e9)
    one = predict.predict([replace(full, items=132)], 0, [{**code, "warps": 1}])
    assert one.issue_s == few.issue_s, "a warp starts one instruction a cycle"
    with pytest.raises(KeyError):
        predict.predict([full], 3, [])


def test_the_readme_shows_the_predictions() -> None:
    shown = (Path(predict.__file__).parent / "README.md").read_text(encoding="utf-8").splitlines()
    made = [*predict.assumed(), *predict.table(), *predict.exchange_table()]
    assert [line for line in made if line not in shown] == [], "python -m benchmarks.gpu.predict"
    rows = [line.split("`")[1] for line in predict.table()[2:]]
    assert sorted(rows) == sorted(case.name for case in CASES), "a line each"
    spec = whole_spec(tiny=False)
    for each in predict.SLICES.values():
        wanted = step_bytes(spec, each.rows, each.context, each.sequences)
        assert each.num_bytes == pytest.approx(wanted, rel=1e-3)
