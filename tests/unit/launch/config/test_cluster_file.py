"""A cluster's file: what each machine is to run by it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake.base import ConfigError, Role
from mooncake.cli.main import make_parser
from mooncake.launch.config import options
from mooncake.launch.config.cluster_file import ClusterFile, Part, read_cluster_file
from mooncake.launch.config.config import resolve
from mooncake.launch.config.settings import ServeConfig

TOLD: dict[str, Any] = {
    "model": "/m",
    "machines": {
        "a": {"address": "10.0.0.7", "gateway": 2, "prefill": 1, "kvstore": 1},
        "b": {"address": "fd00::8", "gateway": 1, "decode": 2},
    },
    "settings": {"dtype": "float32", "slo-ttft-s": 3, "shutdown-timeout": 9},
    "gateway": {"port": 9000, "api-key": ["s3cret"]},
    "decode": {
        "max-num-seqs": 8, "enable-prefix-caching": False,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    },
}  # fmt: skip


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def given(**changes: Any) -> ClusterFile:
        told = {key: value for key, value in {**TOLD, **changes}.items() if value is not None}
        (tmp_path / "k2.yaml").write_text(yaml.safe_dump(told))
        return read_cluster_file(str(tmp_path / "k2.yaml"))

    return given


def config_of(part: Part) -> ServeConfig:
    """Return what `mooncake serve` makes of a process' words and variables."""
    arguments = make_parser("serve").parse_args(part.words)
    known = options.options_of(ServeConfig)
    given = {name: value for name, value in vars(arguments).items() if name in known}
    del given["cluster_secret_file"]
    return resolve({**given, "cluster_secret": "s"}, None, part.environ)


def test_each_process_is_a_command_that_can_be_typed(read: Any) -> None:
    cluster = read()
    a, b = cluster.machines
    seeds = ("tcp://10.0.0.7:6400", "tcp://10.0.0.7:6401", "tcp://[fd00::8]:6400")
    configs = {
        (machine.name, part.name): config_of(part)
        for machine in (a, b)
        for part in cluster.parts(machine)
    }
    assert [name for _, name in configs] == [
        "gateway-0", "gateway-1", "prefill-0", "kvstore-0", "gateway-0", "decode-0", "decode-1",
    ]  # fmt: skip
    assert all(config.seeds == seeds for config in configs.values())
    assert all(config.is_seed for (_, name), config in configs.items() if "gateway" in name)
    second = configs["a", "gateway-1"]
    assert (second.port, second.join_port, second.api_key) == (9001, 6401, ("s3cret",))
    assert (second.slo_ttft_s, second.prefill) == (3, 1)
    decode = configs["b", "decode-1"]
    assert (decode.max_num_seqs, decode.enable_prefix_caching) == (8, False)
    assert decode.speculative_config is not None
    assert (decode.node_id, decode.bind_host, decode.dtype) == ("b", "fd00::8", "float32")
    assert decode.shutdown_timeout == 9
    assert decode.api_key == ()


def test_no_secret_is_in_a_command_that_all_users_of_the_machine_see(read: Any) -> None:
    cluster = read(kvstore={"admin-token": "t0ken"})
    parts = {part.name: part for part in cluster.parts(cluster.machines[0])}
    words = [word for part in parts.values() for word in part.words]
    assert not [word for word in words if "s3cret" in word or "t0ken" in word]
    assert parts["gateway-1"].environ == {"MOONCAKE_API_KEY": "s3cret"}
    assert parts["kvstore-0"].environ == {"MOONCAKE_ADMIN_TOKEN": "t0ken"}
    assert parts["prefill-0"].environ == {}


def test_who_is_to_be_there(read: Any) -> None:
    cluster = read()
    a, b = cluster.machines
    assert cluster.members(a) == {
        "prefill@a": 1, "kvstore@a": 1, "gateway-a-6400": 1, "gateway-a-6401": 1,
    }  # fmt: skip
    assert cluster.members(b) == {"decode@b": 2, "gateway-b-6400": 1}


def test_a_machine_computes_stages_of_engines_elsewhere(read: Any) -> None:
    machines = {
        "a": {"address": "10.0.0.7", "gateway": 1, "prefill": 1, "decode": 1},
        "b": {"address": "fd00::8", "stage": 1},
    }
    decode = {"tensor-parallel-size": 2, "pipeline-parallel-size": 2}
    cluster = read(machines=machines, decode=decode, gateway=None)
    a, b = cluster.machines
    [stage] = cluster.parts(b)
    assert stage.words == [
        "ranks", "--bind-host=fd00::8", "--port=7100", "--cluster-secret-file=worker.credential",
        "--shutdown-timeout=9",
    ]  # fmt: skip
    assert make_parser("ranks").parse_args(stage.words).port == "7100"
    assert [*b.credentials] == ["worker.credential"]
    assert cluster.members(b) == {}, "gateways do not know it"
    configs = {part.name: config_of(part) for part in cluster.parts(a)}
    assert configs["decode-0"].stage_hosts == ("[fd00::8]:7100",)
    assert configs["prefill-0"].stage_hosts == (), "it has no stages"


BY_RAY: dict[str, Any] = {
    "machines": {
        "a": {"address": "10.0.0.7", "gateway": 1, "kvstore": 1, "ray": 0},
        "b": {"address": "10.0.0.8", "gateway": 1},
        "c": {"address": "fd00::9"},
    },
    "ray": {"prefill": 1, "decode": 2},
}  # fmt: skip


def test_ray_places_workers_over_machines(read: Any) -> None:
    cluster = read(**BY_RAY)
    a, b, c = cluster.machines
    assert cluster.ray_hosts == ["10.0.0.8", "fd00::9"]
    assert [part.name for part in cluster.parts(a)] == ["gateway-0", "kvstore-0"]
    assert [part.name for part in cluster.parts(c)] == ["ray-0"]
    assert config_of(cluster.parts(b)[0]).prefill == 1, "gateways know what is to come"
    node = cluster.parts(c)[0]
    assert node.words == ["up", "k2.yaml", "--machine=c", "--ray-node"]
    assert make_parser("up").parse_args(node.words).ray_node
    assert [*c.bundle] == ["worker.credential", "cert.pem", "key.pem", "ca.pem", "ray.token"]
    assert "ray.token" not in a.bundle
    worker = config_of(cluster.placed_part(c, "decode"))
    assert (worker.role, worker.node_id, worker.bind_host) == ("decode", "c", "fd00::9")
    assert (worker.orphan_timeout, worker.max_num_seqs) == (600, 8)
    shorter = read(**BY_RAY, decode={"orphan-timeout": 5})
    assert config_of(shorter.placed_part(c, "decode")).orphan_timeout == 5


def test_what_ray_places_may_be_on_any_machine(read: Any) -> None:
    cluster = read(**BY_RAY)
    others = [
        (Role.GATEWAY, "gateway-a-6400"), (Role.GATEWAY, "gateway-b-6400"), (Role.KVSTORE, "a"),
    ]  # fmt: skip
    assert cluster.missing([others]) == {"prefill": 1, "decode": 2}
    both = [*others, (Role.PREFILL, "c"), (Role.DECODE, "c")]
    assert cluster.missing([both]) == {"decode": 1}
    assert cluster.missing([[*both, (Role.DECODE, "b")]]) == {}


ONE = {"address": "10.0.0.7", "gateway": 1, "decode": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "model: the model is missing"),
        ({"machine": {}}, r"unknown key 'machine' \(did you mean machines\?\)"),
        ({"machines": None}, "machines: the machines are missing"),
        ({"machines": {"a": {**ONE, "decod": 1}}}, "machines: a: unknown key 'decod'"),
        ({"machines": {"authority": ONE}}, "machines: authority: a folder gets this name"),
        (
            {"machines": {"../a": ONE}},
            r"machines: \.\./a: a folder gets this name; use only letters",
        ),
        ({"machines": {"a": {"decode": 1}}}, "machines: a: address: the address is missing"),
        ({"machines": {"a": {"address": "10.0.0.7"}}}, "machines: a: no role runs there"),
        ({"machines": {"a": {**ONE, "decode": "x"}}}, "machines: a: decode: 'x' is not a whole"),
        ({"machines": {"a": {**ONE, "kvstore": 2}}}, "a machine has one pool node"),
        ({"machines": {"a": {**ONE, "stage": 2}}}, "a: stage: one process computes the stages"),
        ({"machines": {"a": {**ONE, "decode": 0}}}, "none has the role decode, and no tokens come"),
        (
            {"machines": {"a": {**ONE, "gateway": 0}}},
            "none has the role gateway, and clients ask one",
        ),
        ({"machines": {"a": ONE, "b": ONE}}, r"two have the address 10\.0\.0\.7"),
        (
            {"machines": {"a": ONE, "b": {**ONE, "address": "127.0.0.1"}}},
            r"127\.0\.0\.1 is reached only from its own machine",
        ),
        (
            {"machines": {"a": {**ONE, "labels": ["rack"]}}},
            "machines: a: labels: 'rack' is not KEY=VALUE",
        ),
        (
            {
                "machines": {
                    "a": {**ONE, "labels": "k=1,r=2"},
                    "b": {**ONE, "address": "10.0.0.8", "labels": {"r": 2, "k": 1}},
                }
            },
            "two have the labels k=1,r=2; give each its own",
        ),
        ({"settings": {"join": "h:1"}}, "settings: join follows from the rest of this file"),
        ({"decode": {"ray-address": "h:1"}}, "decode: ray-address follows from the rest"),
        ({"decode": {"max-num-seq": 1}}, r"decode: unknown setting max-num-seq \(did you mean"),
        ({"gateway": {"api-key": ["one", "two"]}}, "gateway: api-key: give one value here"),
        ({"decode": [1]}, "decode: must hold `name: value` lines"),
        ({"ray": {"kvstore": 1}}, "ray: unknown key 'kvstore'"),
        ({"ray": {"decode": 0}}, "ray: Ray has nothing to place"),
        ({"machines": {"a": {**ONE, "ray": 1}}}, "a: ray: Ray has nothing to place; say what"),
        ({"ray": {"decode": 1}}, "machines: b: decode: Ray places the workers of this role"),
        (
            {**BY_RAY, "machines": {"a": {"address": "10.0.0.7", "gateway": 1, "ray": 0}}},
            "ray: no machine takes what Ray places",
        ),
        ({"machines": {"a": {**ONE, "ray": 2}}}, "a: ray: a machine is one node of Ray"),
        ({**BY_RAY, "decode": {"data-parallel-size": 2}}, "ray: decode: Ray places each worker by"),
        (
            {**BY_RAY, "machines": {"a": {"address": "10.0.0.7", "gateway": 1, "stage": 1}}},
            "ray: Ray places engines whose stages are all on one machine",
        ),
    ],
)
def test_what_describes_no_cluster(read: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**changes)
