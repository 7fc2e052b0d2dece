"""What a process must know to join is read also where its release is not the first process'."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake.base import ConfigError
from mooncake.crypto.keys import KeySource
from mooncake.launch.cluster import facts as facts_module
from mooncake.launch.cluster.facts import (
    ClusterFacts,
    NotUp,
    encode_facts,
    joining_secret,
    read_facts,
    when_up,
    without_secret,
)
from mooncake.launch.cluster.workers import cluster_workers
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import make_plan
from mooncake.launch.host.secrets.credentials import secret_file, write_private
from tests.support.model.checkpoints import write_config_only


@pytest.fixture
def facts(tmp_path: Path) -> ClusterFacts:
    config = resolve(
        {"model": str(write_config_only(tmp_path / "m")), "ssd": ["/d:1GiB"]}, None, {}
    )
    plan = make_plan(config, 4)
    [worker, *_] = cluster_workers(config, plan, "tcp://127.0.0.1:1", "a secret", "here")
    return ClusterFacts(
        gateway_address="tcp://127.0.0.1:1", worker=without_secret(worker),
        scheduler=plan.scheduler, names=["m"],
    )  # fmt: skip


def received(said: dict[str, Any]) -> ClusterFacts:
    return read_facts(msgspec.msgpack.encode(said))


def maps(said: Any) -> Iterator[dict[str, Any]]:
    """Yield all maps in `said`, which are structs to whoever reads it."""
    if isinstance(said, dict):
        yield said
        for each in said.values():
            yield from maps(each)
    elif isinstance(said, list | tuple):
        for each in said:
            yield from maps(each)


def test_what_a_later_release_says_besides_is_passed_over(facts: ClusterFacts) -> None:
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(facts))
    structs = [each for each in maps(said) if each]
    assert {"ssd", "policy", "layout"} <= {name for each in structs for name in each}
    same = received(said)
    for each in structs:
        each["new_in_a_later_release"] = 1
    assert received(said) == same


def test_what_an_earlier_release_does_not_say_has_its_default(facts: ClusterFacts) -> None:
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(facts))
    del said["scheduler"]["policy"], said["worker"]["kvstore"]["ssd"], said["worker"]["health"]
    assert received(said).scheduler == facts.scheduler
    del said["worker"]["layout"]
    with pytest.raises(ConfigError, match=r"`layout`.*; run the same release here"):
        received(said)


def test_what_gateways_tell_holds_no_secret_and_no_command_that_prints_keys(
    facts: ClusterFacts,
) -> None:
    keys = KeySource(name="ssd-key", command="kms --token t0ken")
    options = msgspec.structs.replace(facts.worker.options, weights_key=keys)
    worker = msgspec.structs.replace(
        facts.worker, cluster_secret="s3cret", ssd_key=keys, options=options
    )
    told = encode_facts(msgspec.structs.replace(facts, worker=worker))
    assert b"t0ken" not in told
    assert b"s3cret" not in told
    assert read_facts(told).worker.layout == facts.worker.layout


ADDRESS = f"tcp://10.0.0.7:6400#{'a' * 64}"


def test_a_joining_process_must_have_the_secret_or_be_of_the_same_user_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    joining = {"role": "decode", "join": ADDRESS}
    with pytest.raises(ConfigError, match=r"^cluster-secret: the cluster at tcp://10\.0\.0\.7"):
        joining_secret(resolve(joining, None, {}))
    assert joining_secret(resolve({**joining, "cluster_secret": "given"}, None, {})) == "given"
    write_private(secret_file(ADDRESS), "kept")
    assert joining_secret(resolve(joining, None, {})) == "kept"


def test_what_is_not_up_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "ASK_AGAIN_S", 0.0)
    asked = 0

    def ask() -> str:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise NotUp("it starts")
        return "up"

    assert when_up(ask, 600) == "up"
    assert asked == 3
    asked = 0
    with pytest.raises(NotUp, match="it starts"):
        when_up(ask, 0)
    stop = threading.Event()
    stop.set()
    with pytest.raises(NotUp):
        when_up(ask, 600, stop)
