"""Each message takes a credential of its role; clients speak for themselves and their tenant."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from mooncake.base import messages as m
from mooncake.base import pool_messages as p
from mooncake.base import rights
from mooncake.base.blocks import BlockKey
from mooncake.base.pool_messages import AnyMessage
from mooncake.base.rights import (
    MAX_KEYS,
    MAX_KEYS_AT_ONCE,
    MAX_NAME_CHARS,
    SENDERS,
    SPEAKERS,
    CredentialRole,
    Sender,
    client_id,
    client_key,
    is_clients,
    keys_in,
    speaker_of,
    tenant_key,
)
from tests.unit.rpc.test_codec import EXAMPLES

W, G = CredentialRole.WORKER, CredentialRole.GATEWAY
C, O = CredentialRole.POOL_CLIENT, CredentialRole.OPERATOR  # noqa: E741
CHANNEL_KEY = "ab" * 32
OWN = m.WorkerRef(client_id(CHANNEL_KEY) + "1", "e", f"tcp://10.0.0.7:1#{CHANNEL_KEY}")
WHENCE = "10.0.0.7"
OTHER = m.WorkerRef("decode-0", "e", "tcp://10.0.0.8:1")
KEY = tenant_key(b"k" * 16, "acme")
SCOPED = sorted(
    (kind for kind in SENDERS if {C, O} & SENDERS[kind]), key=lambda kind: kind.__name__
)


def sender(*roles: CredentialRole, tenant: str | None = "acme") -> Sender:
    return Sender(name="etl", roles=frozenset(roles), tenant=tenant, channel_key=CHANNEL_KEY)


def refusal(sender: Sender, message: Any, whence: str = WHENCE) -> str | None:
    return rights.refusal(sender, message, whence)


def example(kind: type[m.Message], speaker: m.WorkerRef = OWN, key: BlockKey = KEY) -> Any:
    """Return a message with all fields filled in that name a process or a block."""
    found, *_ = [each for each in EXAMPLES if type(each) is kind]
    changes: dict[str, Any] = {}
    if kind in SPEAKERS:
        changes[SPEAKERS[kind]] = speaker
    for field in msgspec.structs.fields(kind):
        if field.name in ("keys", "written", "dropped", "corrupt"):
            changes[field.name] = [key]
        elif field.name == "head":
            changes["head"] = m.ChainHead([key], 0)
        elif field.name == "tenant":
            changes["tenant"] = "acme"
    if kind is m.WorkerHello:
        changes["role"] = m.Role.CLIENT
    if kind is m.BlockEvents:
        changes["stored"] = changes["removed"] = []
    return msgspec.structs.replace(found, **changes)


def test_every_message_has_its_senders() -> None:
    assert SENDERS.keys() == set(get_args(AnyMessage))
    assert all(SENDERS.values())


@pytest.mark.parametrize("role", CredentialRole)
@pytest.mark.parametrize("kind", SENDERS, ids=lambda kind: kind.__name__)
def test_a_message_takes_a_credential_of_its_role(
    kind: type[m.Message], role: CredentialRole
) -> None:
    message = example(kind)
    if kind is m.WorkerHello and role is W:
        message = msgspec.structs.replace(message, role=m.Role.DECODE)
    if role is O:
        message = _without_keys(message)
    why = refusal(sender(role), message)
    if role in SENDERS[kind]:
        assert why is None
    else:
        assert why is not None
        assert f"may not send {kind.__name__}" in why
        assert any(f"role {each.value}" in why for each in SENDERS[kind])


def _without_keys(message: Any) -> Any:
    fields = {field.name for field in msgspec.structs.fields(message)}
    emptied: dict[str, Any] = {name: [] for name in fields & {"keys", "written", "corrupt"}}
    return msgspec.structs.replace(message, **emptied)


@pytest.mark.parametrize("kind", SCOPED, ids=lambda kind: kind.__name__)
def test_what_clients_send_names_its_sender_where_the_owner_looks(kind: type[m.Message]) -> None:
    """A field of a new message that names a process or keys cannot be forgotten."""
    hints = get_type_hints(kind, include_extras=True)
    refs = {name for name, hint in hints.items() if m.WorkerRef in (hint, *get_args(hint))}
    assert refs - {"source"} == ({SPEAKERS[kind]} if kind in SPEAKERS else set())
    keyed = {name for name, hint in hints.items() if hint in (list[BlockKey], m.ChainHead)}
    assert keyed <= {"keys", "written", "dropped", "corrupt", "head", "stored", "removed"}
    assert set(keys_in(example(kind))) == ({KEY} if keyed - {"stored", "removed"} else set())


@pytest.mark.parametrize("kind", SPEAKERS, ids=lambda kind: kind.__name__)
def test_a_client_speaks_for_nobody_else(kind: type[m.Message]) -> None:
    client = sender(C, O, tenant=None)
    assert refusal(client, example(kind)) is None
    for other in (
        OTHER,
        m.WorkerRef(OWN.worker_id, "e", OTHER.address),
        m.WorkerRef("decode-0", "e", OWN.address),
        m.WorkerRef(OWN.worker_id, "e", OWN.address + "0"),
        m.WorkerRef(OWN.worker_id, "e", f"tcp://10.0.0.8:1#{CHANNEL_KEY}"),
        m.WorkerRef(OWN.worker_id, "e", f"tcp://db.internal:1#{CHANNEL_KEY}"),
    ):
        message = example(kind, speaker=other)
        assert "may not speak for" in str(refusal(client, message))
        assert speaker_of(message) == other


def test_a_client_does_not_leave_out_who_it_is() -> None:
    """What it orders is counted for it."""
    order = m.Replicate(source=OTHER, keys=[KEY], tenant="acme")
    assert "does not name itself in" in str(refusal(sender(C), order))
    assert refusal(sender(C), msgspec.structs.replace(order, asker=OWN)) is None


@pytest.mark.parametrize("kind", SCOPED, ids=lambda kind: kind.__name__)
def test_a_client_names_keys_of_its_tenant_only(kind: type[m.Message]) -> None:
    for key in (b"k" * 16, tenant_key(b"k" * 16, "other")):
        message = example(kind, key=key)
        why = refusal(sender(C), message) if C in SENDERS[kind] else None
        if C in SENDERS[kind] and list(keys_in(message)):
            assert "keys of tenant 'acme' only" in str(why)
        else:
            assert why is None


def test_one_foreign_key_among_own_ones_is_enough() -> None:
    message = p.FindBlocks(asker=OWN, ticket=1, keys=[KEY, b"k" * 16, KEY])
    assert "only" in str(refusal(sender(C), message))
    hidden = m.PinBlocks(reader=OWN, ticket=1, keys=[KEY], head=m.ChainHead([b"k" * 16], 0))
    assert "only" in str(refusal(sender(C), hidden))


@pytest.mark.parametrize("kind", [m.PutStart, m.Replicate])
def test_a_client_stores_for_its_tenant_only(kind: type[m.Message]) -> None:
    for tenant in ("other", ""):
        message = msgspec.structs.replace(example(kind), tenant=tenant)
        assert "of tenant 'acme', not of" in str(refusal(sender(C), message))
        assert refusal(sender(C, tenant=None), message) is None


def test_a_use_that_stores_nothing_names_no_tenant() -> None:
    used = m.PutStart(writer=OWN, ticket=1, keys=[], head=m.ChainHead([KEY], 1))
    assert refusal(sender(C), used) is None
    others = m.PutStart(writer=OWN, ticket=1, keys=[], head=m.ChainHead([b"k" * 16], 1))
    assert "only" in str(refusal(sender(C), others))


@pytest.mark.parametrize(
    "kind", [m.PutStart, m.PinBlocks, p.FindReplicas, p.ForgetBlocks, p.FindBlocks, p.RemoveBlocks]
)
def test_a_message_names_so_many_blocks_and_no_more(kind: type[m.Message]) -> None:
    for who in (sender(C, tenant=None), sender(W), sender(*CredentialRole, tenant=None)):
        if kind not in who.may_send:
            continue
        in_pieces = kind in (p.FindBlocks, p.RemoveBlocks) or not who.speaks_for_itself
        limit = MAX_KEYS if in_pieces else MAX_KEYS_AT_ONCE
        most = msgspec.structs.replace(example(kind), keys=[KEY] * (limit - 1))
        assert refusal(who, most) is None
        more = msgspec.structs.replace(example(kind), keys=[KEY] * (limit + 1))
        assert f"more than {limit}" in (refusal(who, more) or "")


def test_the_end_of_a_run_names_no_more_blocks_than_its_begin() -> None:
    own = sender(C, tenant=None)
    keys = [KEY] * (MAX_KEYS_AT_ONCE // 2)
    head = m.ChainHead(keys, 0)
    for kind in (m.PutStart, m.PinBlocks):
        most = msgspec.structs.replace(example(kind), keys=keys, head=head)
        assert refusal(own, most) is None, "blocks before a run count, too"
        more = msgspec.structs.replace(example(kind), keys=[*keys, KEY], head=head)
        assert "send it in parts" in (refusal(own, more) or "")
    put = m.PutEnd(writer=OWN, ticket=1, written=keys, dropped=keys)
    assert refusal(own, put) is None
    put = m.PutEnd(writer=OWN, ticket=1, written=keys, dropped=[*keys, KEY])
    assert "send it in parts" in (refusal(own, put) or "")
    unpin = m.Unpin(reader=OWN, ticket=1, corrupt=[KEY] * (MAX_KEYS_AT_ONCE + 1))
    assert "send it in parts" in (refusal(own, unpin) or "")


@pytest.mark.parametrize(
    ("address", "whence", "is_own"),
    [
        ("tcp://10.0.0.7:5", "10.0.0.7", True),
        ("tcp://10.0.0.7:5", "::ffff:10.0.0.7", True),
        ("tcp://[fd00::1]:5", "fd00:0::1", True),
        ("tcp://127.0.0.1:5", "::1", True),
        ("tcp://10.0.0.7:5", "10.0.0.70", False),
        ("tcp://10.0.0.7:5", "127.0.0.1", False),
        ("tcp://127.0.0.1:5", "10.0.0.7", False),
        ("tcp://localhost:5", "127.0.0.1", False),
        ("tcp://10.0.0.7:5", "", False),
        ("tcp://10.0.0.7@10.0.0.8:5", "10.0.0.7", False),
        ("ipc:///run/other/10.0.0.7:5", "10.0.0.7", False),
        ("inproc://10.0.0.7:5", "10.0.0.7", False),
        ("tcp://db.internal/10.0.0.7:5", "10.0.0.7", False),
        ("tcp://10.0.0.7:5;db.internal", "10.0.0.7", False),
        ("tcp://10.0.0.7:" + "5" * MAX_NAME_CHARS, "10.0.0.7", False),
    ],
)
def test_a_client_listens_at_the_host_that_it_sends_from(
    address: str, whence: str, is_own: bool
) -> None:
    named = m.WorkerRef(OWN.worker_id, "e", f"{address}#{CHANNEL_KEY}")
    assert sender(C).is_own(named, whence) is is_own


@pytest.mark.parametrize("kind", SPEAKERS, ids=lambda kind: kind.__name__)
def test_what_others_remember_of_a_client_is_short(kind: type[m.Message]) -> None:
    for named in (
        m.WorkerRef(OWN.worker_id + "x" * MAX_NAME_CHARS, "e", OWN.address),
        m.WorkerRef(OWN.worker_id, "e" * MAX_NAME_CHARS, OWN.address),
    ):
        why = refusal(sender(C, O, tenant=None), example(kind, speaker=named))
        assert why == f"etl names itself by more than {MAX_NAME_CHARS} characters"
        assert not sender(C).is_own(named, WHENCE), "so it is not answered there, either"


def test_clients_of_one_credential_share_its_key() -> None:
    second = m.WorkerRef(client_id(CHANNEL_KEY) + "2", "e", OWN.address)
    assert client_key(OWN) == client_key(second) == CHANNEL_KEY
    worker = m.WorkerRef("decode-0", "e", OWN.address)
    posing = m.WorkerRef(client_id("cd" * 32) + "1", "e", OWN.address)
    assert not any(map(client_key, (OTHER, worker, posing)))


def test_blocks_of_clients_are_known_by_their_keys() -> None:
    assert is_clients(KEY, "acme")
    assert not is_clients(KEY, "other")
    assert not is_clients(b"k" * 16, "acme")


def test_an_operator_handles_no_blocks() -> None:
    ask = p.FindBlocks(asker=OWN, ticket=1, keys=[])
    assert refusal(sender(O), ask) is None
    named = msgspec.structs.replace(ask, keys=[KEY])
    assert "handles no blocks" in str(refusal(sender(O), named))


def test_a_client_joins_as_a_client_and_holds_nothing() -> None:
    hello = example(m.WorkerHello)
    for role in set(m.Role) - {m.Role.CLIENT}:
        posing = msgspec.structs.replace(hello, role=role)
        assert "as a client only" in str(refusal(sender(C), posing))
    events = msgspec.structs.replace(example(m.BlockEvents), stored=[KEY])
    assert "holds no blocks" in str(refusal(sender(C), events))


def test_a_worker_joins_as_a_worker() -> None:
    hello = example(m.WorkerHello)
    for role in m.Role:
        why = refusal(sender(W), msgspec.structs.replace(hello, role=role))
        assert (why is None) == (role not in (m.Role.GATEWAY, m.Role.CLIENT))


def test_keys_of_tenants_never_meet() -> None:
    keys = [bytes([n]) * 16 for n in range(50)]
    mapped = {tenant: [tenant_key(key, tenant) for key in keys] for tenant in ("a", "b", "")}
    everything = [key for of_tenant in mapped.values() for key in of_tenant]
    assert len({*everything, *keys}) == 4 * len(keys)
    assert all(len(key) == 16 for key in everything)
    assert [tenant_key(key, "a") for key in mapped["a"]] == mapped["a"], "it is of the tenant now"
    assert [tenant_key(key, "b") for key in mapped["a"]] != mapped["a"]
