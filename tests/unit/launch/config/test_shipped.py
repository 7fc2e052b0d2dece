"""Each file in `configs/` is read by the reader that users point at it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.launch.config import shipped
from mooncake.launch.config.config import read_settings, resolve
from mooncake.launch.config.key_file import read_keys
from mooncake.launch.config.sim_settings import SimulateSettings
from mooncake.sim.faults.random_faults import Trial
from mooncake.sim.files import read_faults

SECRET = {"MOONCAKE_CLUSTER_SECRET": "s"}


def files(folder: str) -> list[Path]:
    found = sorted((shipped.configs() / folder).glob("*.yaml"))
    assert found
    return found


@pytest.mark.parametrize("path", files("serve"), ids=lambda path: path.stem)
def test_clusters(path: Path) -> None:
    config = resolve({}, str(path), SECRET)
    assert config.model or config.role == "gateway"


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
