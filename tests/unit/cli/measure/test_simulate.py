"""`mooncake simulate` and its kin as users type them: files in, files and exit codes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncake.cli import main as cli
from mooncake.launch.config import shipped
from mooncake.sim.files import read_faults
from tests.support.sim.traces import line


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    ids = [[0, 1], [0, 1, 2], [0, 1, 2, 3], [9, 8]]
    lines = [line(700.0 * n, 512 * len(each), 6, each) for n, each in enumerate(ids)]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


# ---------------------------------------------------------------- settings from a file


def test_a_file_of_settings_stands_between_defaults_and_flags(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run.json"
    settings = tmp_path / "run.yaml"
    settings.write_text(
        f"trace: {trace}\nprefill: 1\ndecode: 2\npolicy: random\nlocal-caches: true\n"
    )
    code, _, err = run(
        capsys, "simulate", "--config", settings, "--policy", "load-balance", "--json", out
    )
    assert code == 0, err
    result = json.loads(out.read_text())
    assert (result["num_prefill"], result["num_decode"]) == (1, 2)
    assert result["policy"] == "load-balance"
    assert result["requests"]["completed"] == 4
    assert result["model"] == "llama3-70b"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prefil: 1", "unknown setting prefil (did you mean prefill?)"),
        ("prefill: many", "prefill: 'many' is not a whole number"),
        ("policy: best", "policy: 'best' is not one of kvcache-centric"),
        ("reject: 3", "reject: 3 is neither true nor false"),
        ("- 1", "must hold `name: value` lines"),
        ("a: [", "run.yaml is not YAML: line 1"),
    ],
)
def test_mistakes_in_a_file_of_settings_are_named(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, text: str, complaint: str
) -> None:
    settings = tmp_path / "run.yaml"
    settings.write_text(text)
    code, _, err = run(capsys, "simulate", "--trace", trace, "--config", settings)
    assert code == 2
    assert complaint in err


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, "simulate")
    assert (code, "--trace is missing" in err) == (2, True)
    code, _, err = run(capsys, "plan")
    assert (code, "--trace is missing" in err) == (2, True)
    code, _, err = run(capsys, "simulate", "--config", tmp_path / "none.yaml")
    assert (code, "none.yaml" in err) == (2, True)


# ---------------------------------------------------------------- faults from a file

FAULTS = [
    {"at_s": 0.5, "kind": "kill", "target": "prefill-0"},
    {"at_s": 1.0, "kind": "lose", "seconds": 1.0, "amount": 0.2},
]


@pytest.mark.parametrize("form", ["yaml", "jsonl"])
def test_faults_of_a_file_happen_to_a_trace_and_are_reported(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, form: str
) -> None:
    faults, out, report = tmp_path / f"f.{form}", tmp_path / "out.json", tmp_path / "out.html"
    lines = [json.dumps(fault) for fault in FAULTS]
    faults.write_text("\n".join(lines if form == "jsonl" else [f"- {one}" for one in lines]))
    code, table, err = run(
        capsys, "simulate", "--trace", trace, "--prefill", 2, "--decode", 1, "--faults", faults,
        "--json", out, "--report", report,
    )  # fmt: skip
    assert code == 0, err
    assert "all held" in table
    written = json.loads(out.read_text())
    assert written["faults"] == {"kill": 1, "lose": 1}
    assert written["endings"] == {"stop": 4}
    assert written["failure"] is None
    html = report.read_text()
    assert "kill prefill-0" in html
    assert "all held" in html
    assert "Time to first token" in html


def test_without_a_trace_faults_happen_to_the_cluster_of_the_seed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text("- {at_s: 1, kind: hang, target: decode-0, seconds: 1}")
    out = tmp_path / "out.json"
    code, _, err = run(capsys, "simulate", "--faults", faults, "--seed", 3, "--json", out)
    assert code == 0, err
    assert json.loads(out.read_text())["faults"] == {"hang": 1}
    same = tmp_path / "same.json"
    run(capsys, "simulate", "--faults", faults, "--seed", 3, "--json", same)
    assert same.read_bytes() == out.read_bytes()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kind: kill", "must hold a list of faults"),
        ("- {kind: kill}", "fault 1: Object missing required field `at_s`"),
        ("- {at_s: 1, kind: kill, who: x}", "fault 1: Object contains unknown field `who`"),
        ("- {at_s: 1, kind: kill, target: decode-77}", "fault 1: no 'decode-77'"),
    ],
)
def test_mistakes_in_a_file_of_faults_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, complaint: str
) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text(text)
    code, _, err = run(capsys, "simulate", "--faults", faults)
    assert code == 2
    assert complaint in err


def test_random_faults_say_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    code, table, _ = run(capsys, "simulate", "--faults", "random", "--seed", 7)
    assert code == 0
    assert "faults, seed 7" in table
    assert "all held" in table


def test_the_help_shows_a_file_of_faults_that_can_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--help"])
    text = capsys.readouterr().out
    example = [row.strip() for row in text.splitlines() if row.startswith("  - {at_s")]
    assert len(example) == 3
    path = tmp_path / "example.yaml"
    path.write_text("\n".join(example))
    assert [fault.kind for fault in read_faults(str(path))] == ["kill", "cut", "lose"]


# ---------------------------------------------------------------- traces and plans


def test_a_trace_is_described_and_its_hit_rates_are_written(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    facts, rates = tmp_path / "facts.json", tmp_path / "rates.json"
    code, table, _ = run(capsys, "trace", "describe", trace, "--json", facts)
    assert code == 0
    assert "hit rate of a cache without bound" in table
    assert json.loads(facts.read_text())["num_requests"] == 4
    code, table, _ = run(capsys, "trace", "cache", trace, "--capacity", "1,100", "--json", rates)
    assert code == 0
    assert [(one["policy"], one["capacity"]) for one in json.loads(rates.read_text())] == [
        ("lru", 1), ("lru", 100)
    ]  # fmt: skip
    assert json.loads(rates.read_text())[1]["hit_rate"] == pytest.approx(5 / 11, abs=1e-6)


def test_a_plan_says_what_was_tried_and_chooses(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    out, report = tmp_path / "plan.json", tmp_path / "plan.html"
    code, table, err = run(
        capsys, "plan", "--trace", trace, "--slo-ttft-s", 5, "--json", out, "--report", report
    )
    assert code == 0, err
    assert "nodes: " in table
    assert sum(one["chosen"] for one in json.loads(out.read_text())) == 1
    html = report.read_text()
    assert "Requests inside both limits" in html
    assert "<svg" in html


# ---------------------------------------------------------------- figures are part of the package


def test_every_file_of_figures_is_read() -> None:
    for kind, folder in shipped.FOLDERS.items():
        names = [path.stem for path in (shipped.configs() / folder).glob("*.json")]
        assert names
        for name in names:
            assert shipped.figures(name, kind).sources
