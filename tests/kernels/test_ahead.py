"""Kernels compiled on a machine without a GPU are those that a launch looks for.

Launches cannot run here, so they go as far as Triton's cache: with the driver of an H200 named, a
launch computes the same digest of itself that it computes there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from mooncake_kernels import trusted
from mooncake_kernels.triton import shipped

from mooncake.base import ConfigError
from mooncake.cli.models import compile as command
from mooncake.model.checkpoint.making.presets import init_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"max_model_len": "128", "max_num_seqs": "16", "max_num_batched_tokens": "128"}


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = init_checkpoint("k2-nano", 0, tmp_path_factory.mktemp("nano") / "nano")
    for weights in made.glob("*.safetensors"):
        weights.unlink()
    return made


def program(*words: str, cache: Path) -> str:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.kernels.quick_compiler", *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1700, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def compiled(nano: Path, folder: Path, *before: str) -> dict[str, Any]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    words = [*before, "compile", str(nano), "--gpu", "h200", "--output", str(folder), "--json"]
    unused = folder.with_name("unused")
    made: dict[str, Any] = json.loads(program(*words, *flags, cache=unused))
    assert not unused.exists(), "it writes to its own directory only"
    return made


def launched(nano: Path, folder: Path) -> dict[str, int]:
    words = [f"{name}={value}" for name, value in SETTINGS.items()]
    own = folder.with_name("triton")
    counts: dict[str, int] = json.loads(
        program("launch", str(folder), str(nano), *words, cache=own)
    )
    made = [path for path in own.rglob("*") if path.is_file()] if own.exists() else []
    assert bool(made) == bool(counts.get("compiled")), "what was read is not compiled again"
    return counts


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_launch_finds_what_was_compiled_ahead_wherever_it_lies_now(
    nano: Path, tmp_path: Path
) -> None:
    """Whatever the step: other batches, contexts and captured sizes than those compiled for."""
    made = compiled(nano, tmp_path / "made", "really")
    assert Path(made["folder"]).name == shipped.name_of(90)
    assert {"_norm", "_kv_write", "_attend", "_combine", "_choose", "_draw", "_penalize"} <= set(
        made["kernels"]
    )
    lists = list(Path(made["folder"]).glob("*/__grp__*.json"))
    assert len(lists) == sum(made["kernels"].values())
    for each in lists:
        code = each.parent / each.name.removeprefix("__grp__").replace(".json", ".cubin")
        assert code.read_bytes()[:4] == b"\x7fELF"
    there = tmp_path / "elsewhere" / "cache"
    there.parent.mkdir()
    shutil.move(tmp_path / "made", there)
    counts = launched(nano, there)
    assert counts.get("compiled", 0) == 0
    assert counts["read"] >= 10
    one = next(there.rglob("__grp___attend.json"))
    shutil.rmtree(one.parent)
    assert launched(nano, there)["compiled"] == 1, "one that is missing is compiled"


# ---------------------------------------------------------------- which directory is used


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "cache"
    (folder / shipped.name_of(90)).mkdir(parents=True)
    before = triton.knobs.cache.manager_class
    yield folder
    triton.knobs.cache.manager_class = before
    shipped._folders.clear()


def test_a_cache_of_other_versions_is_not_used_and_the_log_names_them(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert shipped.use(cache, 90)
    assert shipped._folders == [cache / shipped.name_of(90)]
    (cache / shipped.name_of(90)).rename(cache / "sm_90-triton_3.1.0-torch_2.5.0-0123456789ab")
    assert not shipped.use(cache, 90)
    assert shipped._folders == []
    last = caplog.messages[-1]
    assert f"it has no {shipped.name_of(90)}" in last
    assert "(it has: sm_90-triton_3.1.0-torch_2.5.0-0123456789ab)" in last
    assert "kernels are compiled now" in last


def test_a_cache_for_another_capability_is_not_used(cache: Path) -> None:
    assert not shipped.use(cache, 80)


def test_a_cache_that_others_can_write_to_is_not_used(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = cache / shipped.name_of(90) / "KEY"
    kernel.mkdir()
    kernel.chmod(0o777)
    assert not shipped.use(cache, 90)
    assert f"others may write to {kernel}" in caplog.messages[-1]


def test_a_list_of_files_that_is_damaged_or_names_what_is_missing_counts_as_none(
    cache: Path, tmp_path: Path
) -> None:
    kernel = cache / shipped.name_of(90) / "KEY"
    kernel.mkdir()
    listed = kernel / "__grp__k.json"
    outside = tmp_path / "k.cubin"
    outside.write_bytes(b"")
    for text in ("", "[]", "{}", '{"child_paths": 3}', '{"child_paths": {}}',
                 json.dumps({"child_paths": {"../../k.cubin": str(outside)}})):  # fmt: skip
        listed.write_text(text)
        assert shipped._group(kernel, "k.json") is None
    (kernel / "k.cubin").write_bytes(b"")
    listed.write_text(json.dumps({"child_paths": {"k.cubin": "/made/there/k.cubin"}}))
    assert shipped._group(kernel, "k.json") == {"k.cubin": str(kernel / "k.cubin")}


# ---------------------------------------------------------------- the command


def test_settings_of_kernels_need_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gpu: is missing.*leave out max-num-seqs, model"):
        command.read({"model": "m", "max_num_seqs": "3", "output": str(tmp_path)}, None, {})


def test_settings_come_from_the_file_of_serve(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: kimi-k2-thinking\ntensor-parallel-size: 8\nmax-model-len: 4096\n")
    given = {"gpu": "h800", "output": str(tmp_path), "max_model_len": "2048"}
    config = command.read(given, str(file), {}).serve
    assert config is not None
    assert (config.tensor_parallel_size, config.max_model_len) == (8, 2048)
    assert Path(config.model).name == "kimi-k2-thinking"


def test_interpreted_kernels_are_not_compiled_ahead(nano: Path, tmp_path: Path) -> None:
    given = {"model": str(nano), "gpu": "h200", "output": str(tmp_path / "made")}
    with pytest.raises(ConfigError, match="gpu: TRITON_INTERPRET is set: unset it"):
        command.run(command.read(given, None, {}))


def test_without_a_gpu_the_code_of_cpus_is_compiled_for_this_user_alone_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the umask: a start does not use what a group can write to."""
    folder = tmp_path / "made"

    def compiled(place: Path) -> list[Path]:
        (place / "in").mkdir()
        (file := place / "native-1.so").write_bytes(b"")
        return [file]

    monkeypatch.setattr("mooncake_kernels.native.build.compile_all", compiled)
    before = os.umask(0o002)
    try:
        command.run(command.read({"output": str(folder), "json": True}, None, {}))
        assert os.umask(before) == 0o002, "it is as it was"
    finally:
        os.umask(before)
    assert json.loads(capsys.readouterr().out)["kernels"] == {"native-1.so": 1}
    assert trusted.checked(folder) == folder
    folder.chmod(0o777)
    monkeypatch.setattr("mooncake_kernels.native.build.compile_all", lambda place: [place])
    command.run(command.read({"output": str(folder)}, None, {}))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"mooncake serve will not read it: others may write to {folder}: chmod go-w it"
