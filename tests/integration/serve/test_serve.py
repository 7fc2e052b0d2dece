"""`mooncake serve` as a newcomer runs it: real processes, HTTP, crashes, Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import mooncake
from mooncake.base import InvalidRequest
from mooncake.cli import main
from mooncake.launch.host.processes.descendants import Descendants
from mooncake.launch.host.secrets import credentials
from tests.support.serve.server_process import STOP_S, ServerProcess, nano_checkpoint
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

SMALL = (
    "--port",
    "0",
    "--dtype",
    "float32",
    "--kv-cache-memory-bytes",
    "32MiB",
    "--kvstore-dram-bytes",
    "32MiB",
)
WORKERS = {"prefill-0", "decode-0", "kvstore-0"}
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nano_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    with ServerProcess(str(checkpoint), *SMALL, forked=False) as server:
        server.wait_until_serving()
        yield server
        code, left = server.stop()
        assert code == 0, server.output
        assert left == []
        assert "Traceback" not in server.output


def sockets_of(pids: list[int]) -> set[str]:
    """Return the inodes of these processes' sockets."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(entry)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes


def listening_addresses(pids: list[int]) -> set[str]:
    """Return the local addresses, as /proc writes them, that these processes listen on."""
    inodes, found = sockets_of(pids), set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].split(":")[0])
    return found


def test_a_table_shows_the_workers_and_the_api_agrees(server: ServerProcess) -> None:
    pids = server.worker_pids()
    assert set(pids) == WORKERS
    for worker_id, pid in pids.items():
        assert any(worker_id in line and str(pid) in line for line in server.lines)
        os.kill(pid, 0)
    assert any("pool of 32 MiB" in line for line in server.lines)
    assert server.get("/v1/models")["data"][0]["id"] == "k2-nano"


def test_nothing_listens_beyond_this_machine(server: ServerProcess) -> None:
    with Descendants(server.process.pid) as descendants:
        addresses = listening_addresses([server.process.pid, *descendants.pids])
    assert addresses
    loopback = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}
    assert addresses <= loopback


def test_each_worker_says_on_a_port_of_its_own_how_it_is(server: ServerProcess) -> None:
    workers = server.get("/v1/cluster/status")["workers"]
    urls = {worker["id"]: worker["health_url"] for worker in workers}
    assert set(urls) == WORKERS
    assert len(set(urls.values())) == len(urls), "system-given ports of one machine"
    for worker_id, url in urls.items():
        assert httpx.get(f"{url}/health/ready", timeout=STOP_S).json() == {"status": "ok"}
        assert f'worker="{worker_id}"' in httpx.get(f"{url}/metrics", timeout=STOP_S).text


def written(path: Path) -> bytes:
    """Return what a file holds; nothing where it is none, or another server has removed it."""
    try:
        return path.read_bytes() if path.is_file() else b""
    except FileNotFoundError:
        return b""


def test_other_users_find_no_socket_and_no_secret(server: ServerProcess) -> None:
    address = server.wait_for(r"--join (\S+)").group(1)
    with Descendants(server.process.pid) as descendants:
        pids = [server.process.pid, *descendants.pids]
        inodes = sockets_of(pids)
        arguments = b" ".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
    place, file = credentials.private_dir(), credentials.secret_file(address)
    table = Path("/proc/net/unix").read_text().splitlines()[1:]
    rows = [line.split() for line in table if len(line.split()) == 8]
    paths = {row[7] for row in rows if row[6] in inodes and not row[7].startswith("@")}
    assert any("/worker-" in path for path in paths)
    assert all(Path(path).is_relative_to(place) for path in paths)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (place, file)]
    assert modes == [0o700, 0o600]
    secret = credentials.read_secret(file).encode()
    assert secret not in arguments
    files = {path: written(path) for path in place.rglob("*")}
    assert {path for path, found in files.items() if secret in found} == {file}


def test_the_cluster_gives_the_tokens_of_one_process(
    server: ServerProcess, checkpoint: Path
) -> None:
    prompts = [PROMPT, "x", PROMPT + "again"]
    with mooncake.LLM(str(checkpoint), dtype="float32", kv_cache_memory_bytes="32MiB") as llm:
        alone = llm.generate(prompts, max_tokens=24, temperature=0, ignore_eos=True)
        with pytest.raises(InvalidRequest, match="temperature"):
            llm.generate("x", temperature=9)
    for prompt, generation in zip(prompts, alone, strict=True):
        assert server.complete(prompt, 24) == list(generation.outputs[0].token_ids)


def test_it_passes_what_the_conformance_suite_can_ask_over_http(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--base-url", server.url, "--prompt-tokens", "400", "--json", "--deadline-s", "240"]
    code = main.run(["conformance", *words])
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    results = {verdict["check"]: verdict["result"] for verdict in verdicts}
    assert code == 0, verdicts
    passed = {check for check, result in results.items() if result == "pass"}
    assert passed == {
        "aborts", "handles", "cold-warm", "one-end", "refusals", "transport", "hits",
    }, results  # fmt: skip


@pytest.mark.parametrize("role", ["decode", "prefill", "kvstore"])
def test_a_killed_worker_comes_back_and_the_stream_goes_on(
    server: ServerProcess, role: str
) -> None:
    expected = server.complete(PROMPT, 200)
    pids = server.wait_for_workers(WORKERS)
    body = {
        "prompt": PROMPT, "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    tokens: list[int] = []
    reasons: list[str] = []
    killed = False
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            if tokens and not killed:
                killed = True
                os.kill(pids[f"{role}-0"], signal.SIGKILL)
    assert reasons == ["length"]
    assert tokens == expected
    server.wait_for_workers(WORKERS, without=[pids[f"{role}-0"]])
    assert server.complete(PROMPT, 40) == expected[:40]


def test_one_more_gateway_joins_and_leaves(server: ServerProcess) -> None:
    address = server.wait_for(r"--join (\S+)").group(1)
    words = ("--role", "gateway", "--join", address, "--port", "0", "--served-model-name", "mine")
    with ServerProcess(*words) as joiner:
        joiner.wait_until_serving()
        assert joiner.complete(PROMPT, 24) == server.complete(PROMPT, 24)
        assert joiner.get("/v1/models")["data"][0]["id"] == "mine"
        assert server.get("/v1/models")["data"][0]["id"] == "k2-nano"
        code, left = joiner.stop()
        assert (code, left) == (0, []), joiner.output
    assert server.complete("x", 4)


def test_one_more_worker_joins_and_leaves(server: ServerProcess) -> None:
    address = server.wait_for(r"--join (\S+)").group(1)
    with ServerProcess("--role", "prefill", "--join", address) as joiner:
        name = joiner.wait_for(r"(prefill-\S+) \(pid \d+\) serves").group(1)
        assert set(server.worker_pids()) == WORKERS | {name}, "it serves when the gateway knows it"
        waits = f"waits for a gateway at {address.partition('#')[0]}; Ctrl-C"
        assert joiner.output.index(waits) < joiner.output.index(") serves;")
        assert server.complete("x", 4)
        code, left = joiner.stop()
        assert (code, left) == (0, []), joiner.output
    server.wait_for_workers(WORKERS)
    assert server.complete("x", 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_starts_leaves_nothing(checkpoint: Path, number: int) -> None:
    with ServerProcess(str(checkpoint), *SMALL) as server:
        seen: list[int] = []

        def workers_begin() -> bool:
            with Descendants(server.process.pid) as descendants:
                seen[:] = descendants.pids
            return len(seen) >= 2

        waiting = threading.Event()
        while not workers_begin():
            assert server.process.poll() is None, server.output
            waiting.wait(0.05)
        code, left = server.stop(number)
        assert code == 0, server.output
        assert left == []
        assert [pid for pid in seen if Path(f"/proc/{pid}").exists() and alive(pid)] == []
        assert "Traceback" not in server.output


def alive(pid: int) -> bool:
    """Whether the process runs: what has ended and was not collected by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_colocated_needs_no_second_process(checkpoint: Path) -> None:
    words = (*SMALL, "--colocated", "--shutdown-timeout", "600")
    with ServerProcess(str(checkpoint), *words, forked=False) as server:
        server.wait_until_serving()
        assert set(server.worker_pids().values()) == {server.process.pid}
        assert len(server.complete("hello", 5)) == 5
        with Descendants(server.process.pid) as descendants:
            assert descendants.pids == []
        check_drain(server)


def check_drain(server: ServerProcess) -> None:
    """SIGTERM in the middle of an answer: it is finished, who comes now is told when to come back,
    and the server ends.
    """
    body = {"prompt": PROMPT, "max_tokens": DRAINED_TOKENS, "temperature": 0, "ignore_eos": True}
    ask = {"json": body | {"stream": True, "return_token_ids": True}, "timeout": STOP_S}
    events: list[dict[str, Any]] = []
    refused: list[httpx.Response] = []
    with (
        httpx.Client(timeout=STOP_S, headers={"connection": "close"}) as late_client,
        httpx.stream("POST", f"{server.url}/v1/completions", **ask) as reply,
    ):
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == 1:
                server.process.send_signal(signal.SIGTERM)
                server.wait_for("stopping; running requests may finish")
                for path in ("/v1/completions", "/v1/chat/completions"):
                    refused.append(late_client.post(server.url + path, json=DRAINED[path]))
                refused.append(late_client.get(f"{server.url}/health"))
    assert [event for event in events if "error" in event] == []
    choices = [choice for event in events for choice in event["choices"]]
    assert sum(len(choice.get("token_ids") or []) for choice in choices) == DRAINED_TOKENS
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert [late.status_code for late in refused] == [503] * 3
    assert all(int(late.headers["retry-after"]) > 0 for late in refused)
    assert server.process.wait(STOP_S) == 0, server.output
    assert "Traceback" not in server.output


DRAINED_TOKENS = 800
"""An answer that lasts much longer than the three requests that come meanwhile."""
DRAINED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


def test_a_terminal_shows_a_table_and_a_file_has_the_log(checkpoint: Path, tmp_path: Path) -> None:
    master, slave = os.openpty()
    command = [sys.executable, "-m", "mooncake.cli.main", "serve", str(checkpoint), *SMALL]
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "200"}
    process = subprocess.Popen(
        [*command, "--colocated"], stdout=slave, stderr=slave, env=environ, start_new_session=True
    )
    os.close(slave)
    shown, is_told = b"", False
    try:
        with contextlib.suppress(OSError):  # the terminal has gone with its last process
            while part := os.read(master, 65536):
                shown += part
                if b"Ctrl-C stops" in shown and not is_told:
                    process.send_signal(signal.SIGINT)
                    is_told = True
        assert process.wait(STOP_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())  # without colours
    named = re.search(r"logs of these processes: (\S+)", text)
    assert named is not None, text
    assert "talk to it: open http" in text
    assert " INFO " not in text
    log = Path(named[1]).read_text()
    assert " INFO gateway " in log


READ = "api-keys-file: .* has been read again and is used now"


def test_keys_change_while_it_runs(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"

    def write(*names: str) -> None:
        fresh = tmp_path / "fresh"
        fresh.write_text("keys:\n" + "".join(f"  - {{name: {n}, key: sk-{n}}}\n" for n in names))
        fresh.replace(path)

    def status_of(name: str) -> int:
        headers = {"Authorization": f"Bearer sk-{name}"}
        return httpx.get(f"{server.url}/v1/models", headers=headers, timeout=STOP_S).status_code

    write("alice")
    words = (*SMALL, "--colocated", "--api-keys-file", str(path))
    with ServerProcess(str(checkpoint), *words) as server:
        server.wait_until_serving()
        server.wait_for(READ)  # once more at the start
        assert (status_of("alice"), status_of("bob")) == (200, 401)
        write("alice", "bob")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(READ, number=2)
        wait_until(lambda: status_of("bob") == 200, "the loop has the new keys")
        assert status_of("alice") == 200
        server.process.send_signal(signal.SIGHUP)  # this alone, as the file is what it was
        server.wait_for(READ, number=3)
        path.write_text("keys: 7")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("the keys stay as they were: api-keys-file: .*must hold `keys:`")
        assert (status_of("alice"), status_of("bob")) == (200, 200)
        write("bob", "carl", "dave")  # and nobody says so
        server.wait_for(READ, number=4)
        wait_until(lambda: status_of("alice") == 401, "the loop has the new keys")
        assert status_of("bob") == 200


def test_weights_that_are_missing_end_the_start_with_one_line(
    checkpoint: Path, tmp_path: Path
) -> None:
    torn = tmp_path / "torn"
    torn.mkdir()
    for file in checkpoint.iterdir():
        (torn / file.name).write_bytes(file.read_bytes())
    config = json.loads((torn / "config.json").read_text())
    (torn / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    with ServerProcess(str(torn), *SMALL, "--max-model-len", "1k") as server:
        code = server.process.wait(240)
        server.wait_for(r"^mooncake: \S+: .*missing")
        assert code == 1
        assert "Traceback" not in server.output
