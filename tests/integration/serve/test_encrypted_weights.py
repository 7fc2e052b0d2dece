"""A cluster that serves encrypted weights gives the tokens of the plain ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mooncake.cli import main as cli
from mooncake.launch.llm import LLM
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.serve.server_process import ServerProcess
from tests.support.waiting import LONG_S

KEY = "0123456789abcdef" * 4
PROMPT = list(range(3, 103))
SMALL = ("--max-model-len", "512", "--kv-cache-memory-bytes", "16MiB", "--port", "0")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_checkpoint(
        "k2-nano", 3, tmp_path_factory.mktemp("model") / "plain", dtype="float32"
    )


@pytest.fixture(scope="module")
def key_file(plain: Path) -> Path:
    path = plain.parent / "key"
    path.write_text(KEY + "\n")
    return path


@pytest.fixture(scope="module")
def sealed(plain: Path, key_file: Path) -> Path:
    out = plain.parent / "sealed"
    words = ["model", "encrypt", str(plain), "--weights-key-file", str(key_file)]
    assert cli.run([*words, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def wanted(plain: Path) -> list[int]:
    with LLM(str(plain), max_model_len=512, kv_cache_memory_bytes="16MiB") as llm:
        [output] = llm.generate(PROMPT, max_tokens=24, temperature=0, ignore_eos=True)
        return list(output.outputs[0].token_ids)


def test_from_python(sealed: Path, key_file: Path, wanted: list[int]) -> None:
    settings = {"max_model_len": 512, "kv_cache_memory_bytes": "16MiB"}
    with LLM(str(sealed), weights_key_file=str(key_file), **settings) as llm:
        [output] = llm.generate(PROMPT, max_tokens=24, temperature=0, ignore_eos=True)
    assert list(output.outputs[0].token_ids) == wanted


@pytest.mark.parametrize("source", ["file", "variable"])
def test_every_worker_of_a_cluster_finds_the_key(
    sealed: Path,
    key_file: Path,
    wanted: list[int],
    source: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [str(sealed), *SMALL, "--dram", "16MiB"]
    if source == "file":
        words += ["--weights-key-file", str(key_file)]
    else:
        monkeypatch.setenv("MOONCAKE_WEIGHTS_KEY", KEY)
    with ServerProcess(*words) as server:
        server.wait_until_serving()
        assert server.complete(PROMPT, 24) == wanted
        assert KEY not in server.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "its weights are encrypted; give the key (--weights-key-file, "),
        (["--weights-key-command", f"echo {'9' * 64}"], "was encrypted with another key"),
        (["--weights-key-command", "false"], "weights-key-command: false ended with 1"),
    ],
)
def test_mistakes_are_one_line(sealed: Path, words: list[str], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mooncake.cli.main", "serve", str(sealed), *SMALL, *words],
        capture_output=True, text=True, timeout=LONG_S,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.splitlines()
    assert message in line


def test_an_altered_byte_ends_the_start(plain: Path, key_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "sealed"
    words = ["model", "encrypt", str(plain), "--weights-key-file", str(key_file)]
    assert cli.run([*words, "--out", str(out)]) == 0
    file = max(out.glob("*.enc"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-m", "mooncake.cli.main", "serve", str(out), *SMALL, "--colocated",
         "--weights-key-file", str(key_file)],
        capture_output=True, text=True, timeout=LONG_S,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f"{file}: the bytes at" in done.stderr
    assert "Traceback" not in done.stderr
