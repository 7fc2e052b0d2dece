"""`mooncake pool`: a node's figures, values in and out by name, drain. A call of a client each."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from mooncake.base import ConfigError, MooncakeError, format_bytes

DEFAULT_URL = "http://127.0.0.1:8100"
DRAIN_POLL_S = 0.1

STATS_EXAMPLES = """examples:
  mooncake pool stats
  mooncake pool stats --all           all nodes of the pool, and their sums
  mooncake pool stats --url http://10.0.0.7:8100 --json | jq .counters.blocks_hit
"""
PUT_EXAMPLES = """examples:
  mooncake pool put notes notes.txt
  tar c models | mooncake pool put models.tar - --tenant alice
"""
GET_EXAMPLES = """examples:
  mooncake pool get notes > notes.txt
  mooncake pool get models.tar --tenant alice --out models.tar
  mooncake pool get --block 5d41402abc4b2a76b9719d911017c592 --out block.bin
"""
EVICT_EXAMPLES = """examples:
  mooncake pool evict notes models.tar
  mooncake pool evict --block 5d41402abc4b2a76b9719d911017c592
"""
WHERE_EXAMPLES = """examples:
  mooncake pool where notes           which nodes hold it, in which tier, what is pinned
  mooncake pool where --block 5d41402abc4b2a76b9719d911017c592 --json
"""
PIN_EXAMPLES = """examples:
  mooncake pool pin notes             evicted after all that is not pinned
  mooncake pool pin notes --hard      never evicted
  mooncake pool unpin notes
"""
REPLICATE_EXAMPLES = """examples:
  mooncake pool replicate notes             one more node has it: two in all
  mooncake pool replicate notes --nodes 3   copies that nobody reads go again; pins keep them
"""
BENCH_EXAMPLES = """examples:
  mooncake pool bench
  mooncake pool bench --url http://10.0.0.7:8100 --transport rdma --batch 32 --rounds 100
"""
DRAIN_EXAMPLES = """examples:
  mooncake pool drain                 take nothing more, copy to other nodes what only it holds,
                                      save what is worth it, return when done
  mooncake pool drain --wait 0        begin, do not wait
"""

AddCommand = Callable[..., Any]


def add(commands: Any, command: AddCommand) -> None:
    """Add `pool` and its commands to the command line."""
    pool = command(commands, "pool", "look at a pool node, put and get", None, STATS_EXAMPLES)
    kinds = pool.add_subparsers(title="commands", required=True, metavar="COMMAND")
    stats = command(kinds, "stats", "what a node holds and has done", _stats, STATS_EXAMPLES)
    stats.add_argument("--all", action="store_true", help="of all nodes of the pool")
    where = command(kinds, "where", "which nodes hold a value", _where, WHERE_EXAMPLES)
    where.add_argument("name", metavar="NAME", nargs="?", help="of a value")
    where.add_argument("--block", metavar="HEX", help="a block by its key instead")
    put = command(kinds, "put", "store a file under a name", _put, PUT_EXAMPLES)
    put.add_argument("name", metavar="NAME", help="what it is asked for by")
    put.add_argument("file", metavar="FILE", help="-: standard input")
    get = command(kinds, "get", "write a stored value", _get, GET_EXAMPLES)
    get.add_argument("name", metavar="NAME", nargs="?", help="what it was put under")
    get.add_argument("--block", metavar="HEX", help="a block by its key instead")
    get.add_argument("--out", metavar="FILE", help="default: standard output")
    evict = command(kinds, "evict", "take values out of all nodes", _evict, EVICT_EXAMPLES)
    evict.add_argument("name", metavar="NAME", nargs="*", help="of values")
    evict.add_argument(
        "--block", metavar="HEX", action="append", default=[], help="a block, may be repeated"
    )
    pin = command(kinds, "pin", "keep values in DRAM", _pin, PIN_EXAMPLES)
    pin.add_argument("--hard", action="store_true", help="never evict them; there is a limit")
    unpin = command(kinds, "unpin", "keep values no longer", _pin, PIN_EXAMPLES)
    unpin.set_defaults(hard=None)
    for each in (pin, unpin):
        each.add_argument("name", metavar="NAME", nargs="+", help="of values")
    copies = command(
        kinds, "replicate", "have values on several nodes", _replicate, REPLICATE_EXAMPLES
    )
    copies.add_argument("name", metavar="NAME", nargs="+", help="of values")
    copies.add_argument("--nodes", type=int, default=2, metavar="N", help="in all (default: 2)")
    bench = command(kinds, "bench", "measure puts and gets from here", _bench, BENCH_EXAMPLES)
    bench.add_argument(
        "--batch", type=int, default=16, metavar="BLOCKS", help="in one call (default: 16)"
    )
    bench.add_argument(
        "--rounds", type=int, default=20, metavar="N", help="calls each way (default: 20)"
    )
    bench.add_argument(
        "--transport", default="auto", metavar="LIST", help="e.g. rdma,tcp; auto: all that work"
    )
    drain = command(kinds, "drain", "have a node finish and take no more", _drain, DRAIN_EXAMPLES)
    drain.add_argument(
        "--wait", type=float, default=60.0, metavar="S", help="at most so long (default: 60)"
    )
    for each in (stats, where, put, get, evict, pin, unpin, copies, bench, drain):
        each.add_argument(
            "--url",
            default=DEFAULT_URL,
            help=f"of the node's --admin-port (default: {DEFAULT_URL})",
        )
        each.add_argument(
            "--cluster-secret", metavar="TEXT", help="of the pool (env MOONCAKE_CLUSTER_SECRET)"
        )
        each.add_argument("--json", action="store_true", help="print one JSON document")
    for each in (where, put, get, evict, pin, unpin, copies):
        each.add_argument("--tenant", default="", metavar="NAME", help="whose value it is")


def _stats_all(arguments: argparse.Namespace) -> int:
    from mooncake.launch import pool_view

    with _session(arguments) as session:
        shown = pool_view.pool_document(session.stat_all())
    _tell(arguments, shown, pool_view.pool_words(shown))
    return 1 if shown["total"]["nodes_silent"] else 0


def _where(arguments: argparse.Namespace) -> int:
    from mooncake.launch import pool_view

    if (arguments.name is None) == (arguments.block is None):
        raise ConfigError("give a NAME or --block HEX")
    with _session(arguments) as session:
        if arguments.name is not None:
            keys = session.value_keys(arguments.name, arguments.tenant)
        else:
            keys = [_key(arguments.block)]
        replicas = session.replicas(keys) if keys else []
    shown = pool_view.replica_document(keys, replicas)
    _tell(arguments, shown, pool_view.replica_words(replicas))
    return 0 if keys and not shown["num_missing"] else 1


def _stats(arguments: argparse.Namespace) -> int:
    from mooncake.launch import pool_metrics

    if arguments.all:
        return _stats_all(arguments)
    with _session(arguments) as session:
        shown = pool_metrics.document(session.stat())
    if arguments.json:
        _print(shown)
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


def _put(arguments: argparse.Namespace) -> int:
    data = _read(arguments.file)
    with _session(arguments) as session:
        if not session.put_value(arguments.name, data, arguments.tenant):
            raise MooncakeError(
                f"{arguments.name!r} is there already; `mooncake pool evict` takes it out"
            )
    _tell(arguments, {"name": arguments.name, "num_bytes": len(data)},
          f"{arguments.name}: {format_bytes(len(data))}")  # fmt: skip
    return 0


def _get(arguments: argparse.Namespace) -> int:
    if (arguments.name is None) == (arguments.block is None):
        raise ConfigError("give a NAME or --block HEX")
    if arguments.json and arguments.out is None:
        raise ConfigError("--json and the value would mix on standard output: add --out FILE")
    what = arguments.name or arguments.block
    with _session(arguments) as session:
        if arguments.name is not None:
            data = session.get_value(arguments.name, arguments.tenant)
        else:
            data = next(iter(session.get([_key(arguments.block)])), None)
    if data is None:
        raise MooncakeError(f"{what!r} is not in the pool")
    if arguments.out is None:
        sys.stdout.buffer.write(data)
        return 0
    try:
        Path(arguments.out).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"out: cannot write {arguments.out}: {error.strerror}") from error
    _tell(arguments, {"name": what, "num_bytes": len(data), "file": arguments.out},
          f"{arguments.out}: {format_bytes(len(data))}")  # fmt: skip
    return 0


def _evict(arguments: argparse.Namespace) -> int:
    if not arguments.name and not arguments.block:
        raise ConfigError("give a NAME or --block HEX")
    keys = {written: _key(written) for written in arguments.block}
    with _session(arguments) as session:
        gone = {name: session.remove_value(name, arguments.tenant) for name in arguments.name}
        gone |= dict(zip(keys, session.remove(list(keys.values())), strict=True))
    left = [name for name, is_gone in gone.items() if not is_gone]
    why = "not there, or left: a hard pin is on it, or its disk could not erase it"
    words = [f"{name}: {'gone' if done else why}" for name, done in gone.items()]
    _tell(arguments, gone, "\n".join(words))
    return 1 if left else 0


def _pin(arguments: argparse.Namespace) -> int:
    done: dict[str, bool] = {}
    with _session(arguments) as session:
        for name in arguments.name:
            keys = session.value_keys(name, arguments.tenant)
            if arguments.hard is None:
                pinned = session.unpin(keys)
            else:
                pinned = session.pin(keys, hard=arguments.hard)
            done[name] = bool(keys) and all(pinned.blocks)
    word = "not pinned any more" if arguments.hard is None else "pinned"
    why = "not there, or no room for more hard pins"
    _tell(arguments, done, "\n".join(f"{n}: {word if well else why}" for n, well in done.items()))
    return 0 if all(done.values()) else 1


def _replicate(arguments: argparse.Namespace) -> int:
    if arguments.nodes < 1:
        raise ConfigError(f"nodes: must be at least 1, not {arguments.nodes}")
    found: dict[str, int] = {}
    with _session(arguments) as session:
        for name in arguments.name:
            keys = session.value_keys(name, arguments.tenant)
            count = session.replicate(keys, arguments.nodes, arguments.tenant) if keys else 0
            found[name] = count
    words = {name: f"on {count} nodes" if count else "not there" for name, count in found.items()}
    _tell(arguments, found, "\n".join(f"{name}: {said}" for name, said in words.items()))
    return 0 if all(count >= arguments.nodes for count in found.values()) else 1


def _bench(arguments: argparse.Namespace) -> int:
    from mooncake.base import SystemIds
    from mooncake.launch import options, pool_bench
    from mooncake.transfer.factory import choose_protocols

    for name in ("batch", "rounds"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"{name}: must be at least 1, not {getattr(arguments, name)}")
    ways = options.some_of("auto", "shm", "rdma", "tcp")("transport", arguments.transport)
    config = msgspec.structs.replace(
        _config(arguments), transfer_protocols=list(choose_protocols(ways))
    )
    measured = pool_bench.measure(
        config, arguments.batch, arguments.rounds, time.perf_counter, SystemIds()
    )
    _tell(arguments, measured.document(), measured.words())
    return 1 if measured.wrong_blocks else 0


def _drain(arguments: argparse.Namespace) -> int:
    from mooncake.launch import pool_metrics

    with _session(arguments) as session:
        state = session.drain()
        until_s = time.monotonic() + arguments.wait
        while not state.drained and time.monotonic() < until_s:
            time.sleep(DRAIN_POLL_S)
            state = session.stat()
    word = "drained: its process may be ended" if state.drained else "draining"
    shown = {"worker": state.store.worker_id, "drained": state.drained}
    if state.drain is not None:
        shown["blocks"] = msgspec.to_builtins(state.drain)
        word += f"; {pool_metrics.fate(state.drain)}"
    _tell(arguments, shown, f"{state.store.worker_id}: {word}")
    return 0 if state.drained or not arguments.wait else 1


def _session(arguments: argparse.Namespace) -> Any:
    """Return a client of the node at `--url`."""
    from mooncake.launch.pool_session import PoolSession

    return PoolSession(_config(arguments))


def _config(arguments: argparse.Namespace) -> Any:
    """Return where the pool of the node at `--url` is; its secret proves that we may ask."""
    from mooncake.launch.pool_session import locate

    secret = arguments.cluster_secret or os.environ.get("MOONCAKE_CLUSTER_SECRET")
    if not secret:
        raise ConfigError("cluster-secret: give that of the pool, or MOONCAKE_CLUSTER_SECRET")
    return locate(arguments.url, secret)


def _key(written: str) -> bytes:
    try:
        return bytes.fromhex(written)
    except ValueError as error:
        raise ConfigError(f"block: {written!r} is no key (32 hexadecimal digits)") from error


def _read(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error


def _tell(arguments: argparse.Namespace, content: dict[str, Any], words: str) -> None:
    if arguments.json:
        _print(content)
    else:
        print(words)


def _print(content: dict[str, Any]) -> None:
    json.dump(content, sys.stdout, indent=2)
    print()
