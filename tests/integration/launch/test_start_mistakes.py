"""Every way to start it wrongly ends in one clear line and exit code 2, before anything runs; 1
where a server is missing.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from mooncake.cli import main as cli
from mooncake.launch.host import machine_facts
from tests.support.model.checkpoints import write_config_only

TAKEN = "TAKEN_PORT"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with good and bad checkpoints and files in it; the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOONCAKE_API_KEY", raising=False)
    monkeypatch.delenv("MOONCAKE_CLUSTER_SECRET", raising=False)
    write_config_only(tmp_path / "good")
    write_config_only(tmp_path / "llama", model_type="llama")
    write_config_only(tmp_path / "linear", rope_scaling={"type": "linear", "factor": 2})
    write_config_only(tmp_path / "huge", vocab_size=2**31 - 1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a-file").write_text("hello")
    (tmp_path / "s").write_text("a secret\n")
    (tmp_path / "ca").mkdir()
    (tmp_path / "ca" / "ca-key.pem").write_text("a key")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "listed").mkdir()
    (tmp_path / "listed" / "config.json").write_text("[1]")
    (tmp_path / "weightless").mkdir()
    config = (tmp_path / "good" / "config.json").read_text()
    (tmp_path / "weightless" / "config.json").write_text(config)
    (write_config_only(tmp_path / "torn") / "model.safetensors").write_bytes(b"\x09" + 9 * b"\0")
    (tmp_path / "typo.yaml").write_text("model: good\nmax-modle-len: 5\n")
    (tmp_path / "bad.yaml").write_text("model: [")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (tmp_path / "port.json").write_text(json.dumps(taken.getsockname()[1]))
        yield tmp_path


MISTAKES = [
    (
        "serve --role kvstore --cluster-secret-file s",
        "no model is named; put one first",
    ),
    ("serve nowhere", "nowhere is not there; give the directory of a checkpoint"),
    ("serve a-file", "a-file is a file, not a directory"),
    ("serve empty", "empty/config.json: the file is missing"),
    ("serve broken", "broken/config.json: cannot be read as JSON"),
    ("serve listed", "listed/config.json: must hold a JSON object"),
    ("serve weightless", "weightless: no .safetensors file"),
    ("serve torn", "torn/model.safetensors: truncated within its header"),
    ("serve llama", "model_type 'llama' is not supported"),
    ("serve linear", "rope type 'linear' is not supported"),
    ("serve huge", "are free; use fewer workers"),
    ("serve good --max-model-len 1000", "max-model-len: 1000 is more than this model's 256"),
    ("serve good --max-model-len long", "max-model-len: 'long' is not a whole number"),
    ("serve good --block-size 0", "block-size: must be at least 1"),
    ("serve good --api-keys-file nowhere.yaml", "api-keys-file: cannot read nowhere.yaml"),
    ("serve good --api-keys-file typo.yaml", "must hold `keys:` and a list under it"),
    (
        "serve good --ssl-keyfile a-file",
        "ssl-keyfile: it is used only with TLS; add --ssl-certfile FILE",
    ),
    ("serve good --ssl-certfile a-file", "TLS cannot be set up with a-file"),
    (
        "serve good --ssl-certfile a-file --ssl-cert-reqs 2",
        "clients' certificates are checked against their authorities",
    ),
    ("serve good --kvstore-dram-bytes lots", "kvstore-dram-bytes: 'lots' is not a size"),
    ("serve good --kvstore-dram-bytes 1KiB", "is less than one block of this model"),
    ("serve good --ssd somewhere", "ssd: 'somewhere' is not DIR:SIZE (e.g. /mnt/nvme0:2TiB)"),
    ("serve good --kvstore 0 --ssd d:1GiB", "ssd: no kvstore worker would use it"),
    ("serve good --kv-cache-memory-bytes 1KiB", "room for 0 pages, but one sequence of 256 tokens"),
    ("serve good --num-gpu-blocks-override 1", "room for 1 pages, but one sequence of 256 tokens"),
    ("serve good --max-num-seqs 4096", "max_batched_tokens: 2048 is less than max_num_seqs"),
    ("serve good --colocated --health-port 9000", "the API answers /health and /metrics"),
    (
        "serve --role gateway --join h:1 --cluster-secret-file s --health-port 9000",
        "answers /health and /metrics on --port",
    ),
    ("serve good --health-port 65534", "health-port: worker 3 would need port 65536"),
    ("serve good --seed 1", "seed is not a setting of this server: requests have seeds"),
    ("serve good --dtype float64", "dtype: 'float64' is not one of auto, bfloat16"),
    ("serve good --policy best", "policy: 'best' is not one of kvcache-centric"),
    ("serve good --otlp-traces-endpoint localhost:4317", "is not a URL of a server; write it like"),
    (
        "serve good --otlp-traces-sampling-ratio 0.1",
        "nothing is traced; add --otlp-traces-endpoint",
    ),
    (
        "serve good --otlp-traces-endpoint http://h --otlp-traces-sampling-ratio 10",
        "otlp-traces-sampling-ratio: '10' is more than the whole (1)",
    ),
    ("serve good --collect-detailed-traces all", "traces always have all spans"),
    ("serve good --port 99999", "port: must be at least 0 and at most 65535"),
    (f"serve good --port {TAKEN}", "stop what uses it or take another with --port"),
    ("serve good --host no.such.host.invalid --port 0", "is not an address of this machine"),
    ("serve good -tp 2 --device cuda", "this machine shows no NVIDIA GPU; use --device cpu"),
    ("serve good -tp 4", "2 attention heads do not divide among 4 ranks; this model can be cut"),
    ("serve good -tp 2 -dcp 3", "3 does not divide tensor-parallel-size 2"),
    ("serve good -pp 9", "each of 9 stages needs a layer, and this model has 3"),
    (
        "serve good --hardware h200x8",
        "hardware: other hardware can only be planned for",
    ),
    ("serve good --hardware tpu --dry-run", "no figures of 'tpu'; known: a800x8"),
    ("serve good -tp 2 --device cpu --moe-backend triton", "ranks on CPUs do not use it"),
    ("serve good -dp 2", "data-parallel-size=2: workers share their experts only with"),
    ("serve good -pp 2 -dp 2 -ep --device cpu", "or give each to a role of its own (--prefill-set"),
    ("serve good --decode 0", "decode: must be at least 1, unless decode workers join"),
    ("serve good --headless --colocated", "colocated and headless exclude each other"),
    ("serve --headless --role gateway --join h:1", "headless: a process with a --role has no API"),
    ("serve --role gateway", "cluster-secret: a gateway process needs the cluster's secret"),
    (
        "serve --role gateway --join tcp://h:1",
        "cluster-secret: a gateway process needs the cluster's secret; give it by",
    ),
    (
        "serve --role gateway --join h:1 --cluster-secret-file s --policy random",
        "policy: a gateway that joins places requests as its cluster does",
    ),
    (
        "serve --role gateway --join tcp://h:1 --cluster-secret-file s --ssl-keyfile a-file",
        "add --ssl-certfile FILE",
    ),
    ("serve good --prefill -1", "prefill: must be at least 0"),
    ("serve good --colocated --prefill 2", "colocated and prefill exclude each other"),
    ("serve good --role prefill", "add --join HOST:PORT"),
    (
        "serve good --role kvstore --cluster-secret schlüssel",
        "cluster-secret: it travels in a header",
    ),
    (
        "serve good --role kvstore --cluster-secret-file nowhere",
        "cluster-secret-file: cannot read nowhere",
    ),
    (
        "pool stats --cluster-secret s --cluster-secret-file s",
        "cluster-secret and cluster-secret-file exclude each other",
    ),
    ("serve good --role kvstore", "cluster-secret: a kvstore process needs the cluster's secret"),
    (
        "serve good --role prefill --join tcp://h:1",
        "cluster-secret: a prefill process needs the cluster's secret",
    ),
    ("serve good --role kvstore --join tcp://h", "join: 'h' is not HOST:PORT"),
    (
        "serve good --role kvstore --cluster-secret-file s --bind-host 0.0.0.0",
        "bind-host: nobody can connect to 0.0.0.0",
    ),
    (
        "serve good --role kvstore --cluster-secret-file s --dram 1MiB --ssd no/such/place:1MiB",
        "ssd: no/such is not there; create it, or mount the disk first",
    ),
    (
        f"serve good --role kvstore --cluster-secret-file s --dram 1MiB --admin-port {TAKEN}",
        "stop what uses it or take another with --admin-port",
    ),
    (
        f"serve good --role kvstore --cluster-secret-file s --dram 1MiB --join-port {TAKEN}",
        "stop what uses it or take another with --join-port",
    ),
    (
        "serve good --role kvstore --cluster-secret-file s --dram 1MiB --bind-host 192.0.2.1",
        "bind-host: 192.0.2.1 is not an address of this machine",
    ),
    (
        "serve good --role kvstore --cluster-secret-file s --admin-ssl-certfile no.pem",
        "TLS cannot be set up with no.pem",
    ),
    ("serve good --admin-ssl-ca-certs ca.pem", "used only with TLS; add --admin-ssl-certfile FILE"),
    ("serve good --health-ssl-keyfile k.pem", "used only with TLS; add --health-ssl-certfile FILE"),
    ("serve good --health-ssl-certfile no.pem", "TLS cannot be set up with no.pem"),
    (
        "serve good --health-host 0.0.0.0",
        "health-host: at 0.0.0.0 --health-port would speak plain HTTP: add --health-ssl-certfile",
    ),
    (
        "serve good --api-key k --host 0.0.0.0",
        "host: at 0.0.0.0 API keys would travel in plain HTTP: add --ssl-certfile FILE",
    ),
    (
        "serve --role gateway --join tcp://h:1 --cluster-secret-file s "
        "--api-keys-file nowhere.yaml --host 192.0.2.1",
        "or --http-without-tls where the network is private or a proxy in front of it speaks HTTPS",
    ),
    (
        "serve --role decode --join h:1 --cluster-secret-file s --health-host 192.0.2.1",
        "or --http-without-tls where the network is private",
    ),
    (
        "serve good --role kvstore --cluster-secret-file s --admin-host 192.0.2.1",
        "admin-host: at 192.0.2.1 --admin-port would speak plain HTTP",
    ),
    (
        "certificates authority --out ca",
        "ca/ca-key.pem exists already; certificates that it signed",
    ),
    ("certificates host --authority empty --name h --out there", "authority: empty has no ca.pem"),
    ("pool stats --cluster-secret-file s --ssl-ca-certs no.pem", "cannot be set up with no.pem"),
    ("serve good --join 127.0.0.1:1", "add --role prefill|decode|kvstore"),
    ("serve good --role cook --join h:1", "role: 'cook' is not one of prefill, decode, kvstore"),
    ("serve good --bind-host 0.0.0.0", "bind-host: nobody can connect to 0.0.0.0"),
    (
        "serve good --ray-address 192.0.2.1:6379",
        "at 192.0.2.1 Ray would speak without TLS, and anyone who reads its token can run",
    ),
    ("serve good --ray-address here", "ray-address: 'here' is not HOST:PORT"),
    ("serve good --slo-ttft-s 0", "slo-ttft-s: '0' is not a number above zero"),
    ("serve good --max-model-length 5", "unknown setting max-model-length (did you mean"),
    ("serve good --trust-remote-code", "no code is ever loaded from a checkpoint"),
    (
        "serve good --gpu-memory-utilization 1.5",
        "gpu-memory-utilization: '1.5' is more than the whole (1)",
    ),
    ("serve good better", "'better' is one argument too many"),
    ("serve good --transport pigeon", "transport: 'pigeon' is not one of auto, shm, rdma, tcp"),
    ("serve --config typo.yaml", "unknown setting max-modle-len (did you mean max-model-len?)"),
    ("serve --config bad.yaml", "bad.yaml is not YAML"),
    ("serve --config none.yaml", "cannot read none.yaml"),
    ("serve good --port", "expected one argument"),
    ("model init --preset k9 --out there", "k9"),
    ("model init --preset k2-nano --out empty/../a-file", "a-file"),
    ("model init --preset k2-nano --out a-file/there", "a-file/there: cannot be written"),
    ("simulate --trace trace.jsonl --report no/such.html", "no/such.html: its directory does not"),
    (
        "plan --trace trace.jsonl --model m --hardware h --json empty",
        "empty: the file cannot be written",
    ),
    ("model init --preset k2-nano --seed x --out there", "seed: 'x' is not a whole number"),
    ("model init --out there", "--preset"),
    ("model", "COMMAND"),
    ("", "COMMAND"),
    ("sevre good", "invalid choice: 'sevre'"),
    ("status --url ftp://x", "is not a URL of a server; write it like http"),
    ("status --url http://h:port", "url: 'http://h:port'"),
    (f"status --url http://127.0.0.1:{TAKEN} --wide", "unknown option --wide"),
    ("status --url http://127.0.0.1:1", "is `mooncake serve` running?"),
    ("chat --url http://127.0.0.1:1", "is `mooncake serve` running?"),
    ("pool stats", "cluster-secret: the pool admits only clients that know its secret; give it"),
    ("pool stats --cluster-secret-file s --url http://127.0.0.1:1", "no server answers at"),
    ("pool put name nowhere", "cannot read nowhere"),
    ("pool get", "give a NAME or --block HEX"),
    ("pool get name --json", "add --out FILE"),
    ("pool get --block xyz --cluster-secret-file s --url http://127.0.0.1:1", "no server answers"),
    ("pool evict", "give a NAME or --block HEX"),
    ("pool evict --block xyz", "block: 'xyz' is not a block key"),
    ("pool", "COMMAND"),
    ("chat --max-tokens 0", "max-tokens: must be at least 1"),
    ("chat --temperature warm", "temperature: 'warm' is not a number"),
]


@pytest.mark.parametrize(("command", "message"), MISTAKES, ids=[row[0] or "-" for row in MISTAKES])
def test_one_line_says_what_is_wrong(
    world: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    words = command.replace(TAKEN, (world / "port.json").read_text()).split()
    fails = any(
        word in message
        for word in ("is `mooncake serve` running", "no server answers", "no Ray cluster")
    )
    assert cli.run(words) == (3 if fails else 2)
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("mooncake: ")
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (world / "there").exists()


SAME_LOOKS = [
    ("serve good --dram 9TiB", "are free; use fewer workers"),
    ("serve good --ssl-certfile nowhere.pem", "TLS cannot be set up with nowhere.pem"),
    ("serve good --ssl-certfile a-file --ssl-keyfile no.pem", "TLS cannot be set up with a-file"),
    ("serve good --api-keys-file nowhere.yaml", "api-keys-file: cannot read nowhere.yaml"),
    ("serve good --ssd no/such/place:1MiB", "ssd: no/such is not there; create it"),
    ("serve good --ssd a-file:1MiB", "ssd: a-file is a file; name a directory"),
    ("serve good --ssd empty:9000TiB", "ssd: empty has room for"),
    (
        "serve good --role kvstore --cluster-secret-file s --bind-host 0.0.0.0",
        "bind-host: nobody can connect to 0.0.0.0",
    ),
]


@pytest.mark.parametrize(("command", "message"), SAME_LOOKS, ids=[row[0] for row in SAME_LOOKS])
def test_a_dry_run_refuses_what_serve_refuses(
    world: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    for words in (command, f"{command} --dry-run"):
        assert cli.run(words.split()) == 2
        assert message in capsys.readouterr().err


def test_a_dry_run_makes_nothing(world: Path) -> None:
    words = "serve good --dram 1MiB --kv-cache-memory-bytes 64MiB --ssd disk:1MiB --dry-run"
    assert cli.run(words.split()) == 0
    assert not (world / "disk").exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("serv good", "invalid choice: 'serv' (did you mean serve?)"),
        ("bench throughputs", "invalid choice: 'throughputs' (did you mean throughput?)"),
        ("serve good --prot 80", "unknown setting prot (did you mean port?)"),
        ("status --jsno", "unknown option --jsno (did you mean json?)"),
        ("bench serve --num-prompt 3", "unknown option --num-prompt (did you mean num-prompts?)"),
        ("serve good --quantization fp8", "`mooncake model convert` writes a quantized copy"),
        ("serve good --tool-call-parser kimi_k2", "tool calls are always read"),
        ("serve good --reasoning-parser kimi_k2", "reasoning is always told from answers"),
    ],
)
def test_what_was_meant_is_suggested(
    capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    assert cli.run(command.split()) == 2
    assert message in capsys.readouterr().err


def test_beside_a_package_of_the_same_name(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Callable[[str], str] = metadata.version

    def version(name: str) -> str:
        return "0.3.13" if name == machine_facts.FOREIGN_PACKAGES[0] else real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert cli.run(["serve", "good"]) == 2
    assert "pip uninstall mooncake-transfer-engine" in capsys.readouterr().err


def test_on_another_system(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Plan9")
    assert cli.run(["serve", "good"]) == 2
    assert "runs on Linux, not on Plan9" in capsys.readouterr().err
