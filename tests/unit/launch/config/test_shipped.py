"""Each file in `configs/` is read by the reader that users point at it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from mooncake.base import ModelSpec
from mooncake.cli import main as cli
from mooncake.launch.config import shipped
from mooncake.launch.config.config import read_settings, resolve
from mooncake.launch.config.key_file import read_keys
from mooncake.launch.config.sim_settings import SimulateSettings
from mooncake.model.checkpoint.convert import QUANTIZATION_CONFIGS
from mooncake.model.checkpoint.presets import write_preset_files
from mooncake.model.checkpoint.tensor_shapes import tensor_shapes
from mooncake.sim.faults.random_faults import Trial
from mooncake.sim.files import read_faults
from tests.support.model.specs import KIMI_K2, small_config

SECRET = {"MOONCAKE_CLUSTER_SECRET": "s"}


def files(folder: str) -> list[Path]:
    found = sorted((shipped.configs() / folder).glob("*.yaml"))
    assert found
    return found


@pytest.mark.parametrize("path", files("serve"), ids=lambda path: path.stem)
def test_clusters(path: Path) -> None:
    config = resolve({}, str(path), SECRET)
    assert config.model or config.role == "gateway"


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in files("serve")
        if path.stem not in {"gateway", "pool"} and not path.stem.startswith("k2-")
    ],
    ids=lambda path: path.stem,
)
def test_clusters_can_be_planned(path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_config(max_position_embeddings=32768)))
    words = ["serve", str(tmp_path), "--config", str(path), "--dry-run"]
    assert cli.run([*words, "--kv-cache-memory-bytes", "8MiB", "--device", "cpu"]) == 0


@pytest.mark.parametrize(
    ("name", "shapes", "nodes"),
    [
        ("k2-h800-pp", ["tp8-pp2"], ["1 engine on 2 nodes"]),
        (
            "k2-h800-pd",
            ["tp8-pp2", "tp8-pp2-dcp8"],
            ["tp8-pp2, on h800x8, 1 engine on 2", "tp8-pp2-dcp8, on h800x8, 1 engine on 2"],
        ),
        (
            "k2-h800-16-nodes",
            ["tp8-pp2", "tp8-pp2-dcp8"],
            ["tp8-pp2, on h800x8, 5 engines on 10", "tp8-pp2-dcp8, on h800x8, 3 engines on 6"],
        ),
    ],
)
def test_k2_in_stages_is_planned(
    name: str,
    shapes: list[str],
    nodes: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    config = {**small_config(**KIMI_K2), "quantization_config": QUANTIZATION_CONFIGS["fp8"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = str(shipped.configs() / "serve" / f"{name}.yaml")
    assert cli.run(["serve", str(tmp_path), "--config", path]) == 0
    shown = capsys.readouterr().out
    for words in (*(f"16 ranks ({shape}), " for shape in shapes), *nodes):
        assert words in shown
    assert " 0-30" in shown
    assert " 31-60" in shown


def test_k2_on_gpus_is_planned_with_the_pages_dealt_out_where_it_decodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    config = {**small_config(**KIMI_K2), "quantization_config": QUANTIZATION_CONFIGS["int4"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = str(shipped.configs() / "serve" / "k2-h200.yaml")
    assert cli.run(["serve", str(tmp_path), "--config", path]) == 0
    shown = capsys.readouterr().out
    assert "8 ranks (tp8), " in shown
    assert "8 ranks (tp8-dcp8), " in shown
    assert "on h200x8, 2 engines on 2 nodes" in shown


def test_the_experts_of_k2_lie_on_two_nodes_of_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    config = {**small_config(**KIMI_K2), "quantization_config": QUANTIZATION_CONFIGS["fp8"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = str(shipped.configs() / "serve" / "k2-h800-ep.yaml")
    assert cli.run(["serve", str(tmp_path), "--config", path]) == 0
    shown = capsys.readouterr().out
    assert "8 ranks (tp8-dcp8-dp2-ep16), " in shown
    assert "on h800x8, 2 engines on 2 nodes" in shown
    assert "62.1 GiB" in shown
    words = "--tensor-parallel-size 1 --decode-context-parallel-size 1 --data-parallel-size 16"
    assert cli.run(["serve", str(tmp_path), "--config", path, *words.split()]) == 2
    assert "holds 73.1 GiB of weights" in capsys.readouterr().err


def test_the_cluster_with_limits() -> None:
    config = resolve({}, str(shipped.configs() / "serve" / "2p2d.yaml"), {})
    assert (config.prefill, config.decode, config.slo_ttft_s) == (2, 2, 5)


@pytest.mark.parametrize("path", files("simulate"), ids=lambda path: path.stem)
def test_simulated_clusters(path: Path) -> None:
    settings = read_settings(SimulateSettings, {}, str(path), {})
    for name, kind in ((settings.model, "models"), (settings.hardware, "hardware")):
        assert (shipped.configs() / kind / f"{name}.json").is_file()


def test_faults_happen_to_the_small_cluster() -> None:
    path = str(shipped.configs() / "faults.yaml")
    report = Trial(0, read_faults(path), path).run()
    assert report.failure is None
    assert sum(report.faults.values()) == 4


def test_keys() -> None:
    keys = read_keys(str(shipped.configs() / "api-keys.example.yaml"))
    assert [(key.name, key.tenant, key.max_concurrent) for key in keys] == [
        ("alice", "red", 32), ("nightly-batch", "blue", 4)
    ]  # fmt: skip


def test_a_wheel_has_them_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mooncake"
    (package / "configs").mkdir(parents=True)
    monkeypatch.setattr(shipped.mooncake, "__file__", str(package / "__init__.py"))
    assert shipped.configs() == package / "configs"
    (package / "configs").rmdir()
    assert shipped.configs() == tmp_path / "configs"


def test_without_a_model_the_one_in_the_package_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ({}, {"model": shipped.DEMO}):
        config = resolve(given, None, {})
        assert config.names == (shipped.DEMO,)
        assert Path(config.model, "model.safetensors").stat().st_size < 20 * 2**20
    Path(shipped.DEMO).mkdir()
    assert resolve({"model": shipped.DEMO}, None, {}).model == shipped.DEMO


def test_what_the_package_carries_is_what_training_writes(tmp_path: Path) -> None:
    """Its shape and names are the preset's, and its weights those that an engine reads."""
    carried = shipped.checkpoint(shipped.DEMO)
    written = write_preset_files(shipped.DEMO, tmp_path)
    assert json.loads((carried / "config.json").read_text()) == written
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (carried / name).read_text() == (tmp_path / name).read_text()
    with safe_open(carried / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    wanted = {str(name) for name in tensor_shapes(ModelSpec.from_config(written))}
    assert names >= wanted
