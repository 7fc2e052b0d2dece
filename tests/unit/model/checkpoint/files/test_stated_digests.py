"""What a checkpoint says of its weights is enough for who reads none, and checked by who does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mooncake.base import CheckpointError
from mooncake.cli.main import run
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import make_plan
from mooncake.model.checkpoint.files import checkpoint_files
from mooncake.model.checkpoint.files.checkpoint_files import CheckpointFiles
from mooncake.model.checkpoint.files.revision import STATED_NAME
from mooncake.model.checkpoint.making.presets import init_checkpoint

JOINS = {"join": "h:1", "cluster_secret": "s"}
NO_ENGINE = [
    {"role": "gateway", **JOINS}, {"role": "kvstore", **JOINS},
    {"headless": True, "prefill": 0, "decode": 0, "kvstore": 0},
]  # fmt: skip
ENGINES = [{}, {"colocated": True}, {"role": "decode", **JOINS}, {"headless": True}]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint beside what `mooncake model digests` writes of it."""
    place = tmp_path_factory.mktemp("checkpoints")
    model = init_checkpoint("k2-nano", 1, place / "nano")
    assert run(["model", "digests", str(model), "--out", str(place / "said")]) == 0
    return model


@pytest.fixture
def small(whole: Path, tmp_path: Path) -> Path:
    """The same without weights, as a ConfigMap has it."""
    folder = shutil.copytree(whole, tmp_path / "small", ignore=lambda _, names: weights(names))
    shutil.copy(said(whole), folder)
    return folder


def said(whole: Path) -> Path:
    return whole.parent / "said" / STATED_NAME


def weights(names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(".safetensors")]


def revision(model: Path, settings: dict[str, Any]) -> str:
    return make_plan(resolve({"model": str(model), **settings}, None, {}), 4).model.revision


@pytest.mark.parametrize("settings", NO_ENGINE)
def test_a_process_without_engines_needs_no_weights(
    settings: dict[str, Any], small: Path, whole: Path
) -> None:
    assert not list(small.glob("*.safetensors"))
    assert revision(small, settings) == CheckpointFiles.open(whole).revision()
    (small / STATED_NAME).unlink()
    with pytest.raises(CheckpointError, match=rf"small: it has neither weights nor {STATED_NAME},"):
        revision(small, settings)


@pytest.mark.parametrize("settings", NO_ENGINE)
def test_it_hashes_nothing_where_the_checkpoint_says_what_its_weights_are(
    settings: dict[str, Any], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = CheckpointFiles.open(whole).revision()
    model = shutil.copytree(whole, tmp_path / "model")
    shutil.copy(said(whole), model)
    monkeypatch.delattr(checkpoint_files, "file_digests")
    assert revision(model, settings) == expected


@pytest.mark.parametrize("settings", ENGINES)
def test_an_engine_needs_weights_and_compares_them(
    settings: dict[str, Any], small: Path, whole: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"safetensors: cannot be read"):
        revision(small, settings)
    model = shutil.copytree(whole, tmp_path / "model")
    shutil.copy(said(whole), model)
    assert revision(model, settings) == CheckpointFiles.open(whole).revision()
    file, *_ = model.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{file.name}: it is not what {STATED_NAME} says"):
        revision(model, settings)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b'{"files": 1}', b'{"format": "other", "files": {}}', b'{"files": {}}',
        json.dumps({"files": {"../a.safetensors": "0" * 64}}).encode(),
        json.dumps({"files": {"a.safetensors": "0" * 63}}).encode(), b"\xff",
    ],
)  # fmt: skip
def test_what_says_no_digests_is_refused(content: bytes, small: Path) -> None:
    (small / STATED_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=STATED_NAME):
        revision(small, NO_ENGINE[0])


def test_the_command_writes_a_list_that_does_not_name_its_other_file(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(whole, tmp_path / "model")
    shutil.copy(said(whole), model)
    assert run(["model", "digests", str(model)]) == 0
    printed = capsys.readouterr().out
    assert printed == (whole.parent / "said" / "digests").read_text()
    assert STATED_NAME not in printed
    assert "-of-00003.safetensors" in printed
    wanted = ["model", "verify", str(model), "--digests", str(whole.parent / "said" / "digests")]
    assert run(wanted) == 0
    (tmp_path / "taken").touch()
    assert run(["model", "digests", str(model), "--out", str(tmp_path / "taken")]) == 2
    assert f"out: cannot write to {tmp_path / 'taken'}: File exists" in capsys.readouterr().err
