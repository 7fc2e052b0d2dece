"""docs/vllm.md, step by step: its commands are typed as they stand there, at other ports, and what
the page says one sees is seen. vLLM's environment gets our package by the page's command only.
`test_apart` types the page's part on prefill and decode apart.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.support.servers import VLLM_ENV, Layout, running
from benchmarks.support.vllm_environment import why_no_connector
from tests.support.docs.typed import in_shell
from tests.support.kvstore.pool_process import until
from tests.vllm import servers
from tests.vllm.docs import ROOT, documented_block
from tests.vllm.servers import WAIT_S, Vllm, free_port, prompt

LENGTH = 1000
WHOLE = 768
"""Tokens of a prompt of that length that come from the pool: one of its blocks holds three of
vLLM's, of 128 tokens each.
"""
PROGRAMS = {"vllm": "vllm.entrypoints.cli.main", "pip": "pip._internal.cli.main"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_no_connector() is not None, reason=why_no_connector() or ""),
]


def environment(home: Path) -> Path:
    """Make an environment that has vLLM and not our package, and return where it is."""
    place = home / "venv"
    venv.create(place)
    (theirs,) = (VLLM_ENV / "lib").glob("python3*/site-packages")
    (own,) = (place / "lib").glob("python3*/site-packages")
    # Packages of that folder are found; what is installed there as editable is not.
    (own / "vllm.pth").write_text(f"{theirs}\n")
    for name, module in PROGRAMS.items():
        program = place / "bin" / name
        program.write_text(
            f"#!{place}/bin/python\nfrom {module} import main\n\n"
            'if __name__ == "__main__":\n    main()\n'
        )
        program.chmod(0o755)
    return place


@dataclass
class Reader:
    """Somebody who follows the page: a folder, vLLM's environment, and other ports."""

    home: Path
    environment: Path
    ports: dict[str, str]

    def here(self, text: str) -> str:
        """Return what the page says, at this reader's ports, with pools that fit."""
        said = "|".join(self.ports)
        text = re.sub(rf"\b({said})\b", lambda found: self.ports[found[0]], text)
        return text.replace("2GiB", "64MiB")

    def in_environment(self, text: str, folder: Path) -> str:
        """Type in vLLM's environment and return what is printed."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text], cwd=folder, env=self.settings(),
            capture_output=True, text=True, check=False, timeout=servers.START_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def settings(self) -> dict[str, str]:
        """Return the variables of a shell in which vLLM's environment is active. pip builds our
        package with the setuptools that are there.
        """
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        path = f"{self.environment / 'bin'}:{os.environ['PATH']}"
        return {**own, "PATH": path, "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INPUT": "1"}

    @contextmanager
    def pool_node(self, command: str, name: str) -> Iterator[None]:
        """Run a node by the command of the page."""
        log = self.home / f"{name}.log"
        program, *words = shlex.split(self.here(command))
        assert program == "mooncake"
        with log.open("wb") as out:
            node = subprocess.Popen(
                [sys.executable, "-m", "mooncake.cli.main", *words], cwd=self.home,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            until(lambda: node.poll() is not None or b"pool node at" in log.read_bytes(),
                  f"{name} is up")  # fmt: skip
            assert node.poll() is None, log.read_text()
            yield
        finally:
            node.kill()
            node.wait()

    @contextmanager
    def vllm(self, name: str, model: Path) -> Iterator[Vllm]:
        """Run vLLM by the command of the page, and what makes it small."""
        said = self.here(documented_block("vllm serve MODEL")).replace("MODEL", str(model))
        command = f'cd {self.home} && exec {said.strip()} {shlex.join(servers.FLAGS)} "$@"'
        layout = Layout(
            name=f"page {name}", command=("bash", "-c", command, "vllm"),
            environment={**servers.ENVIRONMENT, **self.settings(), "PYTHONPATH": ""},
        )  # fmt: skip
        with running(layout, compared=servers.COMPARED, start_s=servers.START_S) as server:
            yield Vllm(server.url, server.log, server.pid)


@dataclass
class World:
    """What the page starts."""

    reader: Reader
    first: Vllm
    second: Vllm


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[World]:
    home = tmp_path_factory.mktemp("page")
    ports = {said: free_port() for said in ("8200", "8100", "8101")}
    reader = Reader(home, environment(home), ports)
    secret, *nodes = documented_block("openssl rand").replace("\\\n", " ").splitlines()
    with pytest.raises(AssertionError, match="No module named 'mooncake'"):
        reader.in_environment("python -c 'import mooncake'", home)
    with ExitStack() as opened:
        in_shell(secret, home)
        for name, command in zip("ab", nodes, strict=True):
            # The page's first node listens where the configuration looks for it by default.
            own = command if "--admin-port" in command else f"{command} --admin-port 8100"
            opened.enter_context(reader.pool_node(own, name))
        reader.in_environment(documented_block("pip install"), ROOT)
        starting = [reader.vllm(name, model) for name in ("first", "second")]
        yield World(reader, *opened.enter_context(servers.at_once(starting)))


def test_the_second_server_finds_what_the_first_has_computed(world: World) -> None:
    """With the page's own limits, so on a busy machine a look-up may come too late. Each try has a
    prompt that only the first server has seen.
    """
    tries = iter(range(1000))

    def is_shared() -> bool:
        tokens = prompt(500 + next(tries), LENGTH)
        expected, found = world.first.ask(tokens), world.second.ask(tokens)
        assert (found.tokens, expected.cached) == (expected.tokens, 0)
        assert found.cached in (0, WHOLE)
        return found.cached == WHOLE

    until(is_shared, "the second server finds the prompt", WAIT_S)


def test_vllms_log_says_where_prefixes_are_shared(world: World) -> None:
    said = f"prefixes are shared through the pool at http://127.0.0.1:{world.reader.ports['8100']}"
    assert [said in server.log.read_text() for server in (world.first, world.second)] == [True] * 2


def test_the_pool_shows_its_blocks(world: World) -> None:
    asked = documented_block("mooncake pool stats").strip()
    url = f"http://127.0.0.1:{world.reader.ports['8100']}"
    shown = in_shell(f"{asked} --url {url} --json", world.reader.home)
    total = json.loads(shown)["total"]
    assert (total["nodes"], total["nodes_silent"]) == (2, 0)
    assert total["dram_blocks_stored"] > 0
