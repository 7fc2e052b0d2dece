"""`mooncake pool` shows a node's figures, moves values in and out by name, and drains a node. Each
command is a call of a client.
"""

from __future__ import annotations

import dataclasses
import json
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from mooncake.base import ConfigError, MooncakeError, format_bytes
from mooncake.cli.command import Command
from mooncake.launch.config.options import count, number, same_as, setting, text, texts, truth
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host.secrets.credentials import writing

DEFAULT_URL = "http://127.0.0.1:8100"
DRAIN_POLL_S = 0.1
NODE, VALUE = "pool node", "value"

STATS_EXAMPLES = """\
mooncake pool stats
mooncake pool stats --all           all nodes of the pool, and their sums
mooncake pool stats --url http://10.0.0.7:8100 --json | jq .counters.blocks_hit
"""
PUT_EXAMPLES = """\
mooncake pool put notes notes.txt
tar c models | mooncake pool put models.tar - --tenant alice
"""
GET_EXAMPLES = """\
mooncake pool get notes > notes.txt
mooncake pool get models.tar --tenant alice --out models.tar
mooncake pool get --block 5d41402abc4b2a76b9719d911017c592 --out block.bin
"""
EVICT_EXAMPLES = """\
mooncake pool evict notes models.tar
mooncake pool evict --block 5d41402abc4b2a76b9719d911017c592
"""
WHERE_EXAMPLES = """\
mooncake pool where notes           which nodes hold it, in which tier, what is pinned
mooncake pool where --block 5d41402abc4b2a76b9719d911017c592 --json
"""
PIN_EXAMPLES = """\
mooncake pool pin notes             evicted after all that is not pinned
mooncake pool pin notes --hard      never evicted
mooncake pool unpin notes
"""
REPLICATE_EXAMPLES = """\
mooncake pool replicate notes             one more node has it: two in all
mooncake pool replicate notes --nodes 3   copies that are not read go again; pins keep them
"""
BENCH_EXAMPLES = """\
mooncake pool bench
mooncake pool bench --url http://10.0.0.7:8100 --transport rdma --batch 32 --rounds 100
"""
DRAIN_EXAMPLES = """\
mooncake pool drain            take nothing more, copy what only it holds, save, return when done
mooncake pool drain --wait 0   begin, do not wait
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """Settings of all commands that ask a pool node."""

    # fmt: off
    url: str = setting(DEFAULT_URL, text, NODE, "URL", "URL of the node's --admin-port")
    cluster_secret: str | None = setting(None, text, NODE, "TEXT", "secret of the pool",
        env="MOONCAKE_CLUSTER_SECRET", secret=True)
    cluster_secret_file: str | None = setting(None, text, NODE, "FILE",
        "file with the secret of the pool, or with a credential",
        env="MOONCAKE_CLUSTER_SECRET_FILE")
    transfer_protection: str = same_as(ServeConfig, "transfer_protection", NODE)
    ssl_ca_certs: str | None = setting(None, text, NODE, "FILE",
        "authorities that sign the node's certificate (default: those that this machine trusts)")
    ssl_certfile: str | None = setting(None, text, NODE, "FILE",
        "own certificate and key, if the node asks for one")
    json: bool = setting(False, truth, NODE, "", "print one JSON document")
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats(Node):
    all: bool = setting(False, truth, NODE, "", "show all nodes of the pool")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tenant(Node):
    """Settings of all commands about values."""

    tenant: str = setting("", text, VALUE, "NAME", "tenant who owns the value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Where(Tenant):
    name: str | None = setting(None, text, VALUE, "NAME", "name of a value", positional=True)
    block: str | None = setting(None, text, VALUE, "HEX", "key of a block, instead of a name")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Get(Where):
    # fmt: off
    out: str | None = setting(None, text, VALUE, "FILE",
        "file to write the value to (default: standard output)")
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Put(Tenant):
    # fmt: off
    name: str = setting("", text, VALUE, "NAME",
        "name under which to store the value", positional=True,
        required=True)
    file: str = setting("", text, VALUE, "FILE",
        "file to store; -: standard input", positional=True,
        required=True)
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evict(Tenant):
    # fmt: off
    name: tuple[str, ...] = setting((), texts, VALUE, "NAME", "names of values", positional=True,
        many="*")
    block: tuple[str, ...] = setting((), texts, VALUE, "HEX", "key of a block; may be repeated",
        repeat=True)
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names(Tenant):
    """Settings of all commands about several values."""

    # fmt: off
    name: tuple[str, ...] = setting((), texts, VALUE, "NAME", "names of values", positional=True,
        many="+", required=True)
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pin(Names):
    hard: bool = setting(False, truth, VALUE, "", "never evict them; there is a limit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicate(Names):
    nodes: int = setting(
        2, count(1), VALUE, "N", "number of nodes that should hold the values, in all"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(Node):
    batch: int = setting(16, count(1), "load", "BLOCKS", "blocks in one call")
    rounds: int = setting(20, count(1), "load", "N", "number of calls each way")
    transport: tuple[str, ...] = same_as(ServeConfig, "transport", "load")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drain(Node):
    wait: float = setting(60.0, number, NODE, "S", "most seconds to wait until the node is drained")


def _stats_all(wanted: Stats) -> int:
    from mooncake.launch.pool_client import view as pool_view

    with _session(wanted) as session:
        shown = pool_view.pool_document(session.stat_all())
    _print(wanted, shown, pool_view.pool_text(shown))
    return 1 if shown["total"]["nodes_silent"] else 0


def _where(wanted: Where) -> int:
    from mooncake.launch.pool_client import view as pool_view

    if (wanted.name is None) == (wanted.block is None):
        raise ConfigError("give a NAME or --block HEX")
    with _session(wanted) as session:
        if wanted.name is not None:
            keys = session.value_keys(wanted.name, wanted.tenant)
        else:
            keys = [_key(wanted.block or "")]
        replicas = session.replicas(keys) if keys else []
    shown = pool_view.replica_document(keys, replicas)
    _print(wanted, shown, pool_view.replica_text(replicas))
    return 0 if keys and not shown["num_missing"] else 1


def _stats(wanted: Stats) -> int:
    from mooncake.launch.pool_node import metrics as pool_metrics

    if wanted.all:
        return _stats_all(wanted)
    with _session(wanted) as session:
        shown = pool_metrics.document(session.stat())
    if wanted.json:
        _print(wanted, shown, "")
        return 0
    counters, tenants = shown.pop("counters"), shown.pop("tenants")
    size = shown["block_bytes"]
    for name, value in shown.items():
        is_count = name.startswith(("dram", "ssd"))
        note = f"  ({format_bytes(int(value) * size)})" if is_count else ""
        print(f"{name:<24} {value}{note}")
    for use in tenants:
        has, may = use["num_blocks"], use["max_blocks"]
        note = f"{format_bytes(has * size)} of {format_bytes(may * size)}"
        print(f"{'tenant ' + use['tenant']:<24} {use['tier']}: {has} of {may}  ({note})")
    for name, value in counters.items():
        if value:
            print(f"{name:<24} {value:.0f}")
    return 0


def _put(wanted: Put) -> int:
    data = _read(wanted.file)
    with _session(wanted) as session:
        if not session.put_value(wanted.name, data, wanted.tenant):
            raise MooncakeError(
                f"{wanted.name!r} is in the pool already; `mooncake pool evict` removes it"
            )
    _print(wanted, {"name": wanted.name, "num_bytes": len(data)},
          f"{wanted.name}: {format_bytes(len(data))}")  # fmt: skip
    return 0


def _get(wanted: Get) -> int:
    if (wanted.name is None) == (wanted.block is None):
        raise ConfigError("give a NAME or --block HEX")
    if wanted.json and wanted.out is None:
        raise ConfigError("--json and the value would mix on standard output: add --out FILE")
    what = wanted.name or wanted.block
    with _session(wanted) as session:
        if wanted.name is not None:
            data = session.get_value(wanted.name, wanted.tenant)
        else:
            data = next(iter(session.get([_key(wanted.block or "")])), None)
    if data is None:
        raise MooncakeError(f"{what!r} is not in the pool")
    if wanted.out is None:
        sys.stdout.buffer.write(data)
        return 0
    with writing(wanted.out):
        Path(wanted.out).write_bytes(data)
    _print(wanted, {"name": what, "num_bytes": len(data), "file": wanted.out},
          f"{wanted.out}: {format_bytes(len(data))}")  # fmt: skip
    return 0


def _evict(wanted: Evict) -> int:
    if not wanted.name and not wanted.block:
        raise ConfigError("give a NAME or --block HEX")
    keys = {written: _key(written) for written in wanted.block}
    with _session(wanted) as session:
        gone = {name: session.remove_value(name, wanted.tenant) for name in wanted.name}
        gone |= dict(zip(keys, session.remove(list(keys.values())), strict=True))
    left = [name for name, is_gone in gone.items() if not is_gone]
    why = "not there, or left: a hard pin is on it, or its disk could not erase it"
    words = [f"{name}: {'gone' if done else why}" for name, done in gone.items()]
    _print(wanted, gone, "\n".join(words))
    return 1 if left else 0


def _pin(wanted: Pin) -> int:
    return _each(
        wanted,
        lambda session, keys: session.pin(keys, hard=wanted.hard),
        "pinned",
        "not there, or no room for more hard pins",
    )


def _unpin(wanted: Names) -> int:
    return _each(
        wanted, lambda session, keys: session.unpin(keys), "not pinned any more", "not there"
    )


def _each(
    wanted: Names, act: Callable[[Any, list[bytes]], Any], done_word: str, why_not: str
) -> int:
    """Pin or unpin the blocks of each value."""
    done: dict[str, bool] = {}
    with _session(wanted) as session:
        for name in wanted.name:
            keys = session.value_keys(name, wanted.tenant)
            done[name] = bool(keys) and all(act(session, keys).blocks)
    lines = [f"{name}: {done_word if well else why_not}" for name, well in done.items()]
    _print(wanted, done, "\n".join(lines))
    return 0 if all(done.values()) else 1


def _replicate(wanted: Replicate) -> int:
    found: dict[str, int] = {}
    with _session(wanted) as session:
        for name in wanted.name:
            keys = session.value_keys(name, wanted.tenant)
            count = session.replicate(keys, wanted.nodes, wanted.tenant) if keys else 0
            found[name] = count
    words = {name: f"on {count} nodes" if count else "not there" for name, count in found.items()}
    _print(wanted, found, "\n".join(f"{name}: {found_on}" for name, found_on in words.items()))
    return 0 if all(count >= wanted.nodes for count in found.values()) else 1


def _bench(wanted: Bench) -> int:
    from mooncake.base import SystemIds
    from mooncake.launch.pool_client import bench
    from mooncake.transfer.choices import choose_protocols

    config = msgspec.structs.replace(
        _config(wanted),
        transfer_protocols=list(choose_protocols(wanted.transport, wanted.transfer_protection)),
    )
    measured = bench.measure(config, wanted.batch, wanted.rounds, time.perf_counter, SystemIds())
    _print(wanted, measured.document(), measured.words())
    return 1 if measured.wrong_blocks else 0


def _drain(wanted: Drain) -> int:
    from mooncake.launch.pool_node import metrics as pool_metrics

    with _session(wanted) as session:
        state = session.drain()
        until_s = time.monotonic() + wanted.wait
        while not state.drained and time.monotonic() < until_s:
            time.sleep(DRAIN_POLL_S)
            state = session.stat()
    word = "is drained, its process may end" if state.drained else "drains"
    shown = {"worker": state.store.worker_id, "drained": state.drained}
    if state.drain is not None:
        shown["blocks"] = msgspec.to_builtins(state.drain)
        word += f"; {pool_metrics.fate(state.drain)}"
    _print(wanted, shown, f"{state.store.worker_id} {word}")
    return 0 if state.drained or not wanted.wait else 1


def _session(wanted: Node) -> Any:
    """Return a client of the node at `--url`."""
    from mooncake.launch.pool_client.session import PoolSession

    return PoolSession(_config(wanted))


def _config(wanted: Node) -> Any:
    """Return where the pool of the node at `--url` is. The secret proves that we may ask."""
    from mooncake.launch.pool_client.session import locate
    from mooncake.transfer.choices import AUTO, choose_protocols

    if not wanted.cluster_secret:
        raise ConfigError(
            "cluster-secret: the pool admits only clients that know its secret; give it by "
            "--cluster-secret-file or MOONCAKE_CLUSTER_SECRET"
        )
    return msgspec.structs.replace(
        locate(wanted.url, wanted.cluster_secret, _tls(wanted)),
        transfer_protocols=list(choose_protocols([AUTO], wanted.transfer_protection)),
        transfer_protection=wanted.transfer_protection,
    )


def _tls(wanted: Node) -> ssl.SSLContext | None:
    """Return the TLS context that checks the node's certificate and shows it ours."""
    if wanted.ssl_ca_certs is None and wanted.ssl_certfile is None:
        return None
    try:
        context = ssl.create_default_context(cafile=wanted.ssl_ca_certs)
        if wanted.ssl_certfile is not None:
            context.load_cert_chain(wanted.ssl_certfile, password="")
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(filter(None, (wanted.ssl_ca_certs, wanted.ssl_certfile)))
        raise ConfigError(f"TLS cannot be set up with {files}: {error}") from error
    return context


def _key(written: str) -> bytes:
    try:
        return bytes.fromhex(written)
    except ValueError as error:
        raise ConfigError(
            f"block: {written!r} is not a block key; write its 32 hexadecimal digits"
        ) from error


def _read(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error


def _print(wanted: Node, content: dict[str, Any], words: str) -> None:
    print(json.dumps(content, indent=2) if wanted.json else words)


COMMANDS = tuple(
    Command(
        words=f"pool {word}", summary=summary, examples=examples, settings=settings, run=run,
        takes_file=True,
    )
    for word, summary, settings, run, examples in (
        ("stats", "show what a node holds and has done", Stats, _stats, STATS_EXAMPLES),
        ("where", "show which nodes hold a value", Where, _where, WHERE_EXAMPLES),
        ("put", "store a file under a name", Put, _put, PUT_EXAMPLES),
        ("get", "write a stored value", Get, _get, GET_EXAMPLES),
        ("evict", "remove values from all nodes", Evict, _evict, EVICT_EXAMPLES),
        ("pin", "keep values in DRAM", Pin, _pin, PIN_EXAMPLES),
        ("unpin", "let values be evicted again", Names, _unpin, PIN_EXAMPLES),
        ("replicate", "copy values to several nodes", Replicate, _replicate, REPLICATE_EXAMPLES),
        ("bench", "measure puts and gets from here", Bench, _bench, BENCH_EXAMPLES),
        ("drain", "let a node hand its blocks to others", Drain, _drain, DRAIN_EXAMPLES),
    )
)  # fmt: skip
