"""Each file in `configs/` is read by the reader that users point at it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from safetensors import safe_open

from mooncake.base import ConfigError, ModelSpec, Role
from mooncake.cli import main as cli
from mooncake.engine.config import EngineConfig
from mooncake.launch.cluster.checks import check_start
from mooncake.launch.config import shipped
from mooncake.launch.config.cluster_file import read_cluster_file
from mooncake.launch.config.config import read_file, read_settings, resolve
from mooncake.launch.config.key_file import read_keys
from mooncake.launch.config.plan import ServePlan, make_plan
from mooncake.launch.config.rank_plan import RankMemory
from mooncake.launch.config.shipped import figures
from mooncake.launch.config.sim_settings import SimulateSettings
from mooncake.launch.host import machine_facts
from mooncake.model.checkpoint.making.convert import QUANTIZATION_CONFIGS
from mooncake.model.checkpoint.making.presets import preset_config, write_preset_files
from mooncake.model.checkpoint.tensor_cuts import tensor_shapes
from mooncake.sim.faults.random_faults import Trial
from mooncake.sim.files import read_faults
from mooncake.sim.world.cost_model import HardwareFigures
from tests.support.model.checkpoints import write_config_only
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


@pytest.mark.parametrize("path", files("cluster"), ids=lambda path: path.stem)
def test_clusters_of_several_machines(path: Path) -> None:
    cluster = read_cluster_file(str(path))
    for machine in cluster.machines:
        for part in cluster.parts(machine):
            if part.role == "stage":
                continue  # `mooncake ranks` gets the model from the engine that it belongs to
            given = {**part.given, "cluster_secret": "s"}
            del given["cluster_secret_file"]
            assert resolve(given, None, {}).model == cluster.model


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
    ("name", "precision", "wanted"),
    [
        ("k2-h200-tp8", "int4", ["8 ranks (tp8), ", "1 engine on 1 node"]),
        ("k2-h200-dcp8", "int4", ["8 ranks (tp8-dcp8), ", "1 engine on 1 node"]),
        ("k2-h200-1p1d", "int4", ["8 ranks (tp8), ", "8 ranks (tp8-dcp8), "]),
        ("k2-h200", "int4", ["(tp8), ", "(tp8-dcp8), ", "on h200x8, 2 engines on 2 nodes"]),
        ("k2-h200-8-nodes", "int4", ["5 engines on 5 nodes", "3 engines on 3 nodes"]),
        ("k2-h200-pp", "fp8", ["16 ranks (tp8-pp2-dcp8), ", "1 engine on 2 nodes", " 31-60"]),
        ("k2-h800-pp", "fp8", ["16 ranks (tp8-pp2), ", "1 engine on 2 nodes", " 0-30", " 31-60"]),
        (
            "k2-h800-pd",
            "fp8",
            ["tp8-pp2, on h800x8, 1 engine on 2", "tp8-pp2-dcp8, on h800x8, 1 engine on 2"],
        ),
        (
            "k2-h800-16-nodes",
            "fp8",
            ["tp8-pp2, on h800x8, 5 engines on 10", "tp8-pp2-dcp8, on h800x8, 3 engines on 6"],
        ),
        (
            "k2-h800-ep",
            "fp8",
            ["8 ranks (tp8-dcp8-dp2-ep16), ", "on h800x8, 2 engines on 2 nodes", "61.8 GiB"],
        ),
    ],
)
def test_k2_on_gpus_is_planned(
    name: str,
    precision: str,
    wanted: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert plan_k2(tmp_path, name, precision, "--dry-run", "--hardware", name[3:7] + "x8") == 0
    shown = capsys.readouterr().out
    for words in wanted:
        assert words in shown


def plan_k2(directory: Path, name: str, precision: str, *words: str) -> int:
    """Plan Kimi-K2 in a precision by a shipped configuration; return the command's exit status."""
    quantization = QUANTIZATION_CONFIGS[precision]
    config = {**small_config(**KIMI_K2), "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    path = str(shipped.configs() / "serve" / f"{name}.yaml")
    return cli.run(["serve", str(directory), "--config", path, *words])


@pytest.mark.parametrize("path", files("serve"), ids=lambda path: path.stem)
def test_each_file_is_planned_as_it_stands_without_a_checkpoint(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOONCAKE_CLUSTER_SECRET", "s")
    monkeypatch.setattr("mooncake.launch.host.machine_facts.available_bytes", lambda: 2**40)
    monkeypatch.setattr("mooncake.launch.cluster.checks.check_disks", lambda *_: None)
    assert cli.run(["serve", "--config", str(path), "--dry-run"]) == 0


@pytest.mark.parametrize(
    "path", [path for path in files("serve") if path.stem != "gateway"], ids=lambda path: path.stem
)
def test_a_dry_run_and_serve_agree(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine like those of the plan, `serve` starts the same engines with the same memory, or
    refuses with the words that the dry run has printed. Files that say so are only planned.
    """
    settings = read_file(str(path))
    is_k2 = path.stem.startswith("k2-")
    model = str(settings["model"])
    config = json.loads(((shipped.shape_of(model) or Path(model)) / "config.json").read_text())
    given: dict[str, object] = {"model": str(write_config_only(tmp_path / "model", **config))}
    if is_k2:
        given["hardware"] = settings.pop("hardware", f"{path.stem[3:7]}x8")
        node = figures(str(given["hardware"]), HardwareFigures)
        monkeypatch.setattr(machine_facts, "num_gpus", lambda: node.num_gpus)
        monkeypatch.setattr(machine_facts, "gpu_bytes", lambda: int(node.hbm_bytes))
    monkeypatch.setattr(machine_facts, "available_bytes", lambda: 2**42)
    monkeypatch.setattr("mooncake.launch.cluster.checks.check_disks", lambda *_: None)
    monkeypatch.setenv("MOONCAKE_CLUSTER_SECRET", "s")
    words = [f"--{name}={value}" for name, value in given.items() if name != "model"]
    assert cli.run(["serve", str(given["model"]), "--config", str(path), "--dry-run", *words]) == 0
    planned = make_plan(resolve({**given, "dry_run": True}, str(path), SECRET), 8)
    only_planned = settings.pop("dry_run", False)
    config_here = resolve({**settings, "model": given["model"]}, None, SECRET)
    shown = capsys.readouterr().out
    if only_planned:
        with pytest.raises(ConfigError) as refused:
            make_plan(config_here, 8)
        assert f"refuses this: {refused.value.message}\n" in shown
        return
    served = make_plan(config_here, 8)
    check_start(config_here, served)
    assert "refuses this" not in shown
    assert served.steps.number == planned.steps.number
    assert served.engines == planned.engines
    for role, _ in served.engines:
        assert limits_of(served, role) == limits_of(planned, role)
        for here, there in zip(served.ranks[role].stages, planned.ranks[role].stages, strict=True):
            assert memory_of(here) == memory_of(there)
    assert served.options == planned.options
    assert served.kvstore == planned.kvstore


def limits_of(plan: ServePlan, role: Role) -> EngineConfig:
    """Return an engine's limits without its pages, of which the start finds how many fit."""
    return dataclasses.replace(plan.engine_of(role), num_blocks=1024)


def memory_of(rank: RankMemory) -> tuple[object, ...]:
    """Return what does not depend on how many pages fit."""
    sizes = rank.weights, rank.dram, rank.communication, rank.libraries, rank.block_bytes
    return rank.layers, *sizes


def test_the_shipped_shapes_are_those_of_the_models() -> None:
    """Of those whose figures are shipped too; that of a preset is what `model init` writes."""
    folder = shipped.configs() / "models"
    shapes = {
        path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/config.json")
    }
    assert shapes.pop("k2-small") == preset_config("k2-small")
    assert len(shapes) == 2
    for name, config in shapes.items():
        told = json.loads((folder / f"{name}.json").read_text())
        spec = ModelSpec.from_config(config)
        assert (spec.num_hidden_layers, spec.hidden_size) == (
            told["num_layers"],
            told["hidden_size"],
        )
        assert spec.n_routed_experts == told["experts"]["num_experts"]
        assert spec.max_position_embeddings == told["max_model_len"]


def test_every_recipe_of_k2_is_planned_above() -> None:
    [mark] = test_k2_on_gpus_is_planned.pytestmark  # type: ignore[attr-defined]
    planned = {name for name, *_ in mark.args[1]}
    assert planned == {path.stem for path in files("serve") if path.stem.startswith("k2-")}


def test_experts_on_sixteen_gpus_that_each_have_all_else_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--tensor-parallel-size 1 --decode-context-parallel-size 1 --data-parallel-size 16"
    assert plan_k2(tmp_path, "k2-h800-ep", "fp8", *words.split()) == 2
    refusal = " ".join(capsys.readouterr().err.split())
    assert "holds 72.8 GiB of weights" in refusal
    assert "--data-parallel-size 4 --enable-expert-parallel, or INT4 weights" in refusal


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
        ("alice", "red", 32), ("operations", "", None), ("nightly-batch", "blue", 4)
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
