"""Where settings come from: flags over file over environment over defaults, nothing unknown."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from mooncake.base import ConfigError
from mooncake.base.tls_files import TlsFiles
from mooncake.launch.cluster.gateways.gateway_process import api_config
from mooncake.launch.config import options
from mooncake.launch.config.config import REFUSED, read_file, resolve, unknown_setting
from mooncake.launch.config.settings import ServeConfig


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    return str(path)


def test_defaults() -> None:
    config = resolve({"model": "m"}, None, {})
    assert config == ServeConfig(model="m")
    assert (config.host, config.port, config.block_size) == ("127.0.0.1", 8000, 64)
    assert (config.prefill, config.decode, config.colocated) == (1, 1, False)


def test_every_default_is_a_value_that_could_be_written() -> None:
    for name, (option, default) in options.options_of(ServeConfig).items():
        if default not in (None, (), ""):
            assert option.read(name, default) == default


def test_every_field_is_a_setting() -> None:
    fields = {field.name for field in dataclasses.fields(ServeConfig)}
    assert fields == set(options.options_of(ServeConfig))


def test_flags_over_file_over_environment(tmp_path: Path) -> None:
    path = write(tmp_path, "model: from-file\nport: 9000\nmax_num_seqs: 8\napi-key: filekey\n")
    environ = {"MOONCAKE_API_KEY": "envkey", "MOONCAKE_CLUSTER_SECRET": "envsecret"}
    config = resolve({"port": "9001"}, path, environ)
    assert config.model == "from-file"
    assert config.port == 9001
    assert config.max_num_seqs == 8
    assert config.api_key == ("filekey",)
    assert config.cluster_secret == "envsecret"


def test_a_secret_in_a_file_is_read_where_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("filed\n")
    given = {"model": "m", "cluster_secret_file": str(file)}
    environ = {"MOONCAKE_CLUSTER_SECRET": "envsecret"}
    assert resolve(given, None, environ).cluster_secret == "filed"
    environ = {"MOONCAKE_CLUSTER_SECRET_FILE": str(file)}
    assert resolve({"model": "m"}, None, environ).cluster_secret == "filed"
    settings = {"model": "m", "cluster_secret": "flag"}
    assert resolve(settings, None, environ).cluster_secret == "flag"
    with pytest.raises(ConfigError, match="exclude each other"):
        resolve({**given, "cluster_secret": "both"}, None, {})
    file.write_text(" ")
    with pytest.raises(ConfigError, match="is empty"):
        resolve(given, None, {})


def test_an_empty_variable_is_no_secret() -> None:
    assert resolve({"model": "m"}, None, {"MOONCAKE_API_KEY": ""}).api_key == ()


def test_keys_are_written_with_either_dash(tmp_path: Path) -> None:
    config = resolve({}, write(tmp_path, "model: m\nslo-ttft-s: 2\nslo_tbt_ms: 80\n"), {})
    assert (config.slo_ttft_s, config.slo_tbt_ms) == (2.0, 80.0)


def test_lists_and_sizes_in_a_file(tmp_path: Path) -> None:
    text = "model: m\nserved-model-name: [a, b]\nkvstore-dram-bytes: 2GiB\nmax-model-len: 32k\n"
    config = resolve({}, write(tmp_path, text), {})
    assert config.names == ("a", "b")
    assert config.kvstore_dram_bytes == 2 * 2**30
    assert config.max_model_len == 32_000


def test_the_name_is_the_directorys_when_none_is_given() -> None:
    assert resolve({"model": "/some/where/k2-small/"}, None, {}).names == ("k2-small",)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert read_file(write(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 80", r"unknown setting prot \(did you mean port\?\)"),
        ("port: [", "is not YAML"),
        ("- a\n- b", "must hold `name: value` lines, not a list"),
        ("port: 80\nPORT: 81", "unknown setting PORT"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "max-num-seqs is given twice"),
        ("port:", "port has no value"),
        ("port: high", "port: 'high' is not a whole number"),
        ("trust-remote-code: true", "no code is ever loaded from a checkpoint"),
        ("1: 2", "unknown setting 1"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve({"model": "m"}, write(tmp_path, text), {})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config: cannot read .*nothing\.yaml"):
        resolve({"model": "m"}, str(tmp_path / "nothing.yaml"), {})


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not a text file"):
        resolve({"model": "m"}, str(path), {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"role": "kvstore", "cluster_secret": "s"}, "no model"),
        ({"model": "m", "role": "prefill"}, "add --join"),
        ({"model": "m", "join": "h:1"}, "add --role"),
        ({"model": "m", "colocated": True, "prefill": 2}, "colocated and prefill exclude"),
        ({"model": "m", "colocated": True, "ray_address": "h:1"}, "colocated and ray-address"),
        (
            {"model": "m", "kv_cache_memory_bytes": "1GiB", "num_gpu_blocks_override": 5},
            "exclude each other: both say how many KV pages",
        ),
        ({"model": "m", "decode": 0}, "decode: must be at least 1"),
        ({"model": "m", "api_key": "schlüssel"}, "only ASCII"),
        ({"model": "m", "transport": "tcp", "require_transport": "tcp"}, "exclude each other"),
        (
            {"model": "m", "colocated": True, "require_transport": "tcp"},
            "moves no KV between workers",
        ),
        ({"role": "decode"}, "add --join"),
        ({"join": "h:1"}, "add --role"),
        ({"role": "decode", "join": "tcp://h:1"}, "a decode process needs the cluster's secret"),
        (
            {"role": "decode", "join": "tcp://h:1", "cluster_secret": "s", "join_port": 1},
            "others join only a gateway",
        ),
        ({"role": "decode", "join": "http://h:1", "cluster_secret": "s"}, "is not HOST:PORT"),
    ],
)
def test_settings_that_do_not_go_together(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(given, None, {})


OVER = {"role": "gateway", "engines": "http://a:8000,http://b:8000/v1/"}


def test_a_gateway_over_engines_needs_neither_model_nor_secret() -> None:
    places = ["http://a:8000=tcp://a:5557,tcp://a:5558", "http://b:8000/=tcp://b:5557"]
    given = {**OVER, "engine_events": places, "policy": "round-robin", "slo_ttft_s": 3, "port": 0}
    config = resolve(given, None, {"MOONCAKE_ENGINE_API_KEY": "k", "MOONCAKE_CLUSTER_SECRET": "s"})
    assert config.model == ""
    assert config.engines == ("http://a:8000", "http://b:8000")
    assert config.engine_events == (
        ("http://a:8000", "tcp://a:5557", "tcp://a:5558"), ("http://b:8000", "tcp://b:5557", None),
    )  # fmt: skip
    assert config.engine_api_key == "k"
    assert config.shown()["engine-api-key"] == "(set)"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engines": "http://a"}, "engines: only a gateway sends requests to them"),
        ({"role": "gateway", "engine_api_key": "k"}, "engines: they are missing"),
        ({**OVER, "engines": "a:8000"}, "engines: 'a:8000' is not a URL of a server"),
        ({**OVER, "engines": "http://a,http://a/v1"}, "engines: http://a is named twice"),
        ({**OVER, "engine_events": "http://c=tcp://c:1"}, "http://c is not one of --engines"),
        ({**OVER, "engine_events": "http://a:8000"}, "is not URL=EVENTS,REPLAY"),
        ({**OVER, "engine_events": "http://a:8000=a:1"}, "is not URL=EVENTS,REPLAY"),
        ({**OVER, "policy": "random"}, "policy: random: over other people's engines"),
        ({**OVER, "model": "m"}, "model: a gateway over other people's engines has no such"),
        ({**OVER, "join": "tcp://a:1"}, "join: a gateway over other people's engines has no"),
        ({**OVER, "max_receipts": 3}, "max-receipts: a gateway over other people's engines"),
        ({**OVER, "slo_tbt_ms": 30}, "slo-tbt-ms: a gateway over other people's engines"),
        ({**OVER, "engine_api_key": "schlüssel"}, "engine-api-key: a key travels in a header"),
        ({**OVER, "host": "0.0.0.0", "api_key": "k"}, "API keys would travel in plain HTTP"),
    ],
)
def test_what_a_gateway_over_engines_cannot_do(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(given, None, {})


def test_a_joining_worker_needs_no_model() -> None:
    assert resolve({"role": "decode", "join": "h:1", "cluster_secret": "s"}, None, {}).model == ""


def test_seeds_are_addresses_of_gateways() -> None:
    given = {"role": "decode", "join": "tcp://a:6400, b:6400", "cluster_secret": "s"}
    assert resolve(given, None, {}).seeds == ("tcp://a:6400", "tcp://b:6400")


def test_a_gateway_whose_address_others_join_decides_for_itself() -> None:
    given = {"role": "gateway", "cluster_secret": "s", "model": "m", "join_port": 6400}
    assert resolve({**given, "slo_ttft_s": 3}, None, {}).is_seed
    both = {**given, "join": "tcp://127.0.0.1:6400,b:6400"}
    assert resolve({**both, "slo_ttft_s": 3}, None, {}).is_seed
    other = {**both, "bind_host": "127.0.0.2"}
    assert not resolve(other, None, {}).is_seed
    with pytest.raises(ConfigError, match="places requests as its cluster does"):
        resolve({**other, "slo_ttft_s": 3}, None, {})
    with pytest.raises(ConfigError, match="no model"):
        resolve({key: given[key] for key in given if key != "model"}, None, {})


def test_secrets_are_never_shown() -> None:
    given = {"api_key": "k3y", "cluster_secret": "s3cret", "admin_token": "t0ken"}
    config = resolve({"model": "m", **given}, None, {})
    shown = config.shown()
    assert not any(secret in f"{shown} {config}" for secret in given.values())
    assert {shown[options.flag(name)] for name in given} == {"(set)"}
    assert shown["port"] == 8000


def test_what_people_bring_from_elsewhere_is_answered() -> None:
    for name, advice in REFUSED.items():
        assert advice in unknown_setting(f"--{name}=1")
        assert name.replace("-", "_") not in options.options_of(ServeConfig)
        for named in re.findall(r"--(?:no-)?([a-z-]+)", advice):
            assert named.replace("-", "_") in options.options_of(ServeConfig)
    assert unknown_setting("--max-num-seq") == (
        "unknown setting max-num-seq (did you mean max-num-seqs?)"
    )


def test_an_unknown_setting_of_a_python_program_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"max-model-length \(did you mean max-model-len\?\)"):
        resolve({"model": "m", "max_model_length": "4k"}, None, {})


def test_the_api_server_gets_its_keys_its_limits_and_its_certificates(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: alice, key: sk-a, tenant: red, max_concurrent: 2}]")
    given = {"model": "m", "api_key": "plain", "api_keys_file": str(keys), "max_body_bytes": "1MiB"}
    given |= {"max_body_cost": "1k", "timeout_keep_alive": "75"}
    api_server = api_config(resolve(given, None, {}))
    assert api_server.api_keys == ("plain",)
    assert [(key.name, key.tenant, key.max_concurrent) for key in api_server.keys] == [
        ("alice", "red", 2)
    ]
    assert (api_server.max_body_bytes, api_server.max_body_cost) == (1 << 20, 1000)
    assert (api_server.keep_alive_s, api_server.tls) == (75, None)
    tls = {"model": "m", "ssl_certfile": "c.pem", "ssl_keyfile": "k.pem"}
    assert api_config(resolve(tls, None, {})).tls == TlsFiles(certfile="c.pem", keyfile="k.pem")
    tls["ssl_ca_certs"] = "ca.pem"
    for written, cert_reqs in ((None, 2), ("1", 1), ("0", 0)):
        more = {} if written is None else {"ssl_cert_reqs": written}
        served = api_config(resolve(tls | more, None, {})).tls
        assert served is not None
        assert (served.ca_certs, served.verify_mode) == ("ca.pem", cert_reqs)


def test_only_an_engine_that_joins_reads_the_weights_of_others() -> None:
    joins = {"role": "decode", "join": "h:1", "weights_from": "engines", "cluster_secret": "s"}
    assert resolve(joins, None, {}).weights_from == "engines"
    for given in ({"model": "m"}, {"role": "kvstore", "join": "h:1", "cluster_secret": "s"}):
        with pytest.raises(ConfigError, match="weights-from: only an engine that joins"):
            resolve({**given, "weights_from": "engines"}, None, {})


def test_workers_leave_the_machine_only_for_a_ray_whose_machines_can_reach_them() -> None:
    given = {"model": "m", "ray_address": "10.0.0.7:6379"}
    assert resolve({"model": "m", "bind_host": "10.0.0.7"}, None, {}).stays_here
    assert resolve(given, None, {}).stays_here
    assert not resolve({**given, "bind_host": "0.0.0.0"}, None, {}).stays_here
