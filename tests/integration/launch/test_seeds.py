"""What a process that joins without Ray learns from gateways, over real channels."""

from __future__ import annotations

import contextlib
import re
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mooncake.base import ConfigError, Forbidden, WorkerRef
from mooncake.base.messages import AskCluster, ClusterTold
from mooncake.base.rights import CredentialRole
from mooncake.cli.main import exit_code
from mooncake.identity.credential import Credential, issue, own_credential
from mooncake.launch.cluster import facts as facts_module
from mooncake.launch.cluster import pool
from mooncake.launch.cluster.facts import encode_facts, facts_of_seeds
from mooncake.launch.cluster.gateways.joined_gateway import JoinedCluster
from mooncake.launch.cluster.workers import joining_workers, own_facts
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import make_plan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import seeds as seeds_module
from mooncake.launch.host.seeds import NotUp
from mooncake.launch.worker.weights import borrowed_weights
from mooncake.rpc.seed_addresses import SeedAddresses
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.transfer.factory import TransferConfig
from tests.support.model.checkpoints import write_config_only
from tests.support.waiting import LONG_S

NOBODY = "127.0.0.1:1"


@pytest.fixture
def credential() -> Credential:
    """The gateway's."""
    return own_credential("hush", CredentialRole.GATEWAY)


@pytest.fixture
def gateway(
    tmp_path: Path, credential: Credential, request: pytest.FixtureRequest
) -> Iterator[str]:
    """The address of a gateway that answers, with settings of its own. The parameter says whether
    people type the address, without a key in it.
    """
    model = write_config_only(tmp_path / "small")
    given = {"role": "gateway", "cluster_secret": "hush", "model": str(model), "block_size": 32,
             "slo_ttft_s": 3}  # fmt: skip
    config = resolve(given, None, {})
    channel = ZmqChannel(credential=credential, is_typed=getattr(request, "param", True))
    facts = encode_facts(own_facts(config, make_plan(config, 4), channel.address))

    def answer(message: object) -> None:
        assert isinstance(message, AskCluster)
        told = ClusterTold(asker=message.asker, ticket=message.ticket, facts=facts)
        channel.send(message.asker.address, told)

    with contextlib.closing(channel), heard(channel, answer):
        yield channel.address


@contextlib.contextmanager
def heard(
    channel: ZmqChannel, answer: Callable[[object], object] = lambda _: None
) -> Iterator[None]:
    """Have a thread hand `answer` what arrives."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            select.select([channel], [], [], 0.05)
            for message in channel.receive():
                answer(message)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def joining(address: str, role: str = "decode", **given: object) -> ServeConfig:
    join = f"tcp://{NOBODY},{address}"
    return resolve({"role": role, "join": join, "cluster_secret": "hush", **given}, None, {})


def test_any_seed_that_is_up_tells_what_the_cluster_is(gateway: str) -> None:
    config = joining(gateway, device="cpu")
    facts = facts_of_seeds(config, own_credential("hush", CredentialRole.WORKER))
    [settings] = joining_workers(config, facts, "hush")
    assert settings.layout.block_tokens == 32
    assert settings.gateway_address == gateway
    assert settings.seeds == [f"tcp://{NOBODY}", gateway]
    assert facts.worker.cluster_secret == "", "it does not travel"


def test_one_question_is_enough_where_a_gateway_is_up(
    gateway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although connections wake who waits for the answer, before it comes."""
    monkeypatch.setattr(seeds_module, "ASK_AGAIN_S", 30.0)
    credential = own_credential("hush", CredentialRole.WORKER)
    with contextlib.closing(seeds_module.Seeds([gateway], credential, "127.0.0.1", None)) as asked:
        [told] = asked.ask()
    assert told.facts


def test_who_wants_to_borrow_weights_learns_from_a_gateway_that_no_engine_runs(
    gateway: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It learns that from the answer, not from silence."""
    monkeypatch.setattr(borrowed_weights, "ANSWER_S", float("inf"))
    config = TransferConfig(secret="hush", host="here", protocols=["tcp"])
    credential = own_credential("hush", CredentialRole.WORKER)
    seeds = [f"tcp://{NOBODY}", gateway]
    found = borrowed_weights.borrow(seeds, tmp_path / "small", "r", config, credential)
    assert found == "no engine runs yet"


def test_a_gateway_that_is_no_seed_places_as_the_seeds_do(gateway: str) -> None:
    cluster = JoinedCluster(joining(gateway, "gateway"))
    assert cluster.plan.layout.block_tokens == 32
    assert cluster.plan.scheduler.ttft_slo_s == 3
    cluster.stop()


@pytest.mark.parametrize("gateway", [True, False], indirect=True)
def test_who_has_another_secret_learns_that_alone(
    gateway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends with the exit code of refusals, not with that of silence."""
    monkeypatch.setattr(facts_module, "ANSWER_S", 1.0)
    monkeypatch.setattr(seeds_module, "LOOK_S", LONG_S)
    place = re.escape(gateway.partition("#")[0])
    with pytest.raises(Forbidden, match=f"cluster-secret: the gateway at {place} has") as refusal:
        facts_of_seeds(joining(gateway), own_credential("other", CredentialRole.WORKER))
    assert exit_code(refusal.value) == 4


def test_where_no_gateway_is_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "ANSWER_S", 0.1)
    with pytest.raises(NotUp, match=f"no gateway answers at tcp://{NOBODY}: is one") as silence:
        facts_of_seeds(
            resolve(
                {"role": "decode", "join": f"tcp://{NOBODY}", "cluster_secret": "hush"}, None, {}
            ),
            own_credential("hush", CredentialRole.WORKER),
        )
    assert exit_code(silence.value) == 3


def test_a_gateway_that_knows_the_secret_and_does_not_answer_is_named(
    credential: Credential, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts_module, "ANSWER_S", 0.1)
    monkeypatch.setattr(seeds_module, "LOOK_S", LONG_S)
    with (
        contextlib.closing(ZmqChannel(credential=credential, is_typed=True)) as mute,
        heard(mute),
        pytest.raises(NotUp, match=r"does not answer: .* --bind-host 127\.0\.0\.1"),
    ):
        facts_of_seeds(joining(mute.address), own_credential("hush", CredentialRole.WORKER))


@pytest.mark.parametrize(
    ("given", "setting"), [({"block_size": 64}, "block-size"), ({"kv_cache_dtype": "fp8"}, "model")]
)
def test_a_pool_node_whose_blocks_do_not_fit_learns_what_to_change(
    gateway: str, tmp_path: Path, given: dict[str, object], setting: str
) -> None:
    model = str(tmp_path / "small")
    config = joining(gateway, "kvstore", model=model, **{"block_size": 32, **given})
    own = WorkerRef("kvstore-a", "e1", "tcp://127.0.0.1:1")
    with SeedAddresses(config.seeds) as meant:
        problem = pool._why_silent(config, make_plan(config, 4), meant, own)
    assert isinstance(problem, ConfigError)
    assert problem.message.startswith(f"{setting}: the cluster of the gateway at tcp://127")
    assert "32 there" in problem.message
    assert exit_code(problem) == 2


STEPS = [
    ("hush\nnew", ["hush", "hush\nnew", "new\nhush"], ["new"]),
    ("new\nhush", ["new", "new\nhush", "hush\nnew"], ["hush"]),
    ("new", ["new", "new\nhush"], ["hush", "hush\nnew"]),
]
"""The steps of a rotation: what the gateway knows, and who joins then and who does not; the first
who joins at a step waits until the port has its key. docs/secrets.md has the same as a table.
"""


def test_at_each_step_of_a_rotation_those_join_that_the_guide_names(
    gateway: str, credential: Credential, monkeypatch: pytest.MonkeyPatch
) -> None:
    for told, let_in, shut_out in STEPS:
        credential.renew(told)
        for secrets in let_in:
            facts = facts_of_seeds(joining(gateway), own_credential(secrets, CredentialRole.WORKER))
            assert facts.gateway_address == gateway
        with monkeypatch.context() as patched:
            patched.setattr(facts_module, "ANSWER_S", 1.0)
            for secrets in shut_out:
                with pytest.raises((NotUp, Forbidden)):
                    facts_of_seeds(joining(gateway), own_credential(secrets, CredentialRole.WORKER))


def test_a_machine_that_cannot_be_answered_is_told_before_it_asks() -> None:
    config = resolve(
        {"role": "decode", "join": "tcp://192.0.2.1:6400", "cluster_secret": "hush"}, None, {}
    )
    with pytest.raises(ConfigError, match=r"cannot reach 127\.0\.0\.1 of this machine: give its"):
        facts_of_seeds(config, own_credential("hush", CredentialRole.WORKER))


def test_a_credential_that_a_gateway_refuses_is_told_apart_from_silence(gateway: str) -> None:
    """The command ends with the exit code of refusals."""
    expired = issue("hush", "late", [CredentialRole.WORKER], expires_s=1.0)
    with pytest.raises(Forbidden, match=r"join: a gateway refuses: .*expired") as refusal:
        facts_of_seeds(joining(gateway), expired)
    assert exit_code(refusal.value) == 4
