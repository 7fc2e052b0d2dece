"""Native code that a first start compiles beside its workers; the compiler only writes its file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
from mooncake_kernels.native import build

from mooncake.launch.cluster import serve
from mooncake.launch.config.config import resolve
from mooncake.launch.worker.native_code import compiled_meanwhile
from mooncake.model.options import ModelOptions
from tests.support.model.checkpoints import write_config_only
from tests.support.waiting import wait_until

Compiler = Callable[[str], Path]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Stands for g++ from now on: notes that it was called, does what it is given, and writes what
    it was asked for. Returns the file of its notes.
    """
    monkeypatch.setattr(build, "COMPILED", tmp_path / "none shipped")

    def make(does: str) -> Path:
        program, notes = tmp_path / "bin" / "g++", tmp_path / "notes"
        program.parent.mkdir()
        last = 'for word; do target=$word; done; : > "$target"'
        program.write_text(f'#!/bin/sh\necho $$ >> "{notes}"\n{does}\n{last}\n')
        program.chmod(0o700)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")
        return notes

    return make


@pytest.fixture
def options(tmp_path: Path) -> ModelOptions:
    if (reason := build.unlikely()) is not None:
        pytest.skip(reason)
    return ModelOptions(device="cpu", cache_dir=str(tmp_path / "cache"))


def test_it_is_made_for_who_comes_later_and_only_once(
    options: ModelOptions, compiler: Compiler
) -> None:
    notes = compiler("")
    folder = Path(str(options.cache_dir))
    with compiled_meanwhile(options, "bfloat16"):
        wait_until(lambda: build.is_made(folder), "it is made")
    calls = notes.read_text()
    with compiled_meanwhile(options, "bfloat16"):
        assert build.is_made(folder)
    assert notes.read_text() == calls


def test_models_that_use_none_compile_none(options: ModelOptions, compiler: Compiler) -> None:
    notes = compiler("")
    with compiled_meanwhile(options, "float32"):
        pass
    assert not notes.exists()


@pytest.mark.parametrize(("decode", "num_starts"), [("1", 1), ("0", 0)])
def test_a_process_that_starts_no_engine_compiles_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decode: str, num_starts: int
) -> None:
    started: list[ModelOptions] = []

    def compiled(options: ModelOptions, dtype: str) -> contextlib.nullcontext[None]:
        del dtype
        started.append(options)
        return contextlib.nullcontext()

    monkeypatch.setattr(serve, "compiled_meanwhile", compiled)
    monkeypatch.setattr(serve, "_run", lambda *_: 0)
    monkeypatch.setattr(serve, "start_log", lambda *_: None)
    model = write_config_only(tmp_path / "small")
    given = {"model": str(model), "headless": True, "prefill": "0", "decode": decode}
    assert serve.serve(resolve(given, None, {})) == 0
    assert len(started) == num_starts


def test_a_start_that_ends_leaves_no_compiler_and_no_files(
    options: ModelOptions, compiler: Compiler
) -> None:
    notes = compiler("sleep 1000")
    with compiled_meanwhile(options, "bfloat16"):
        wait_until(notes.exists, "a compiler runs")
    compilers = [Path("/proc") / pid for pid in notes.read_text().split()]
    wait_until(lambda: not any(each.exists() for each in compilers), "compilers end")
    assert list(Path(str(options.cache_dir)).iterdir()) == []
