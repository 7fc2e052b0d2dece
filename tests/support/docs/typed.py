"""The documents' commands for this machine: in a folder of a test, without what it does not have.

`here` is the rule by which a command is changed before it is typed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from mooncake.launch.config.shipped import DEMO, checkpoint
from mooncake.model.checkpoint.making.convert import QUANTIZATION_CONFIGS
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.checkpoint.weights import Checkpoint
from tests.support.docs.blocks import BLOCKS, ROOT
from tests.support.kvstore.pool_process import SECRET
from tests.support.model.eagle3_heads import config_of, random_tensors, write_head
from tests.support.model.specs import KIMI_K2, small_config

SMALL = {
    ".venv/bin/": "",
    "k2-small": "k2-nano",
    "100GiB": "64MiB",
    "HOST": "127.0.0.1",
    "range(200)": "range(20)",
}
"""What a command says -> what is typed in its place."""
MODELS = {"h200": "kimi-k2-int4", "h800": "kimi-k2-fp8", "": DEMO}
"""The GPUs that a command names -> its `DIR`; without GPUs, the demo model."""
FILES = {"k2.yaml": "# k2.yaml", "faults.yaml": "- {at_s: 10"}
"""A file that commands read -> how the block begins that shows it."""
TIMEOUT_S = 240
SERVE = "mooncake serve"


def here(text: str, words: Mapping[str, str] = SMALL) -> str:
    """Return documented commands as they are typed here: `words` are replaced, `DIR` is a model
    that fits, and `mooncake serve` only plans.
    """
    return "\n".join(_line_here(line, words) for line in text.split("\n"))


def _line_here(line: str, words: Mapping[str, str]) -> str:
    found = re.search(r"h[28]00", line)
    changed = {**words, "DIR": MODELS[found[0] if found else ""]}
    names = "|".join(re.escape(name) for name in changed)
    typed = re.sub(rf"(?<![\w-])({names})", lambda name: changed[name[0]], line)
    return typed if "--dry-run" in typed else typed.replace(SERVE, f"{SERVE} --dry-run")


def prepare(folder: Path, text: str) -> None:
    """Put into a folder what commands read: our own folders, the configurations of Kimi-K2 in two
    precisions, and what the text names of a checkpoint, a draft head, a secret, a file of `FILES`.
    """
    for name in ("configs", "examples", "docs"):
        (folder / name).symlink_to(ROOT / name)
    for precision in ("int4", "fp8"):
        (folder / f"kimi-k2-{precision}").mkdir()
        config = {**small_config(**KIMI_K2), "quantization_config": QUANTIZATION_CONFIGS[precision]}
        (folder / f"kimi-k2-{precision}" / "config.json").write_text(json.dumps(config))
    if "checkpoints/" in text and "model init" not in text:
        init_checkpoint("k2-nano", 0, folder / "checkpoints" / "k2-nano")
    if "HEAD" in text:
        spec = Checkpoint.open(checkpoint(DEMO)).spec
        config = config_of(spec)
        write_head(folder / "HEAD", config, random_tensors(config, spec))
    for name, beginning in FILES.items():
        if name in text:
            [file] = [block for block in BLOCKS if block.text.startswith(beginning)]
            (folder / name).write_text(file.text)
    (folder / "notes.txt").write_text("three lines\nof a\nnote\n")
    if "> secret" not in text:
        (folder / "secret").touch(mode=0o600)
        (folder / "secret").write_text(SECRET)


def in_shell(text: str, folder: Path, **environment: str) -> str:
    """Type commands in a folder, and return what they print. `mooncake` and `python` are those of
    this test. The first command that fails fails the test.
    """
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    program = programs / "mooncake"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mooncake.cli.main "$@"\n')
    program.chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    packages = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=folder, stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": path, "PYTHONPATH": packages, **environment},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout
