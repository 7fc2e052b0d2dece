"""Which messages each role of a credential may send, and what a pool client may name in them.

Pure. The owner of a channel calls `refusal` for every message that arrives. A message that is not
in the table is refused. The rules trust workers and gateways in what they say they hold. Clients
and operators speak for themselves only, and a tenant's client names keys of its tenant only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from hashlib import blake2b
from ipaddress import IPv4Address, IPv6Address, ip_address

from mooncake.base import messages as m
from mooncake.base import pool_messages as p
from mooncake.base.blocks import KEY_BYTES, BlockKey
from mooncake.base.pool_messages import AnyMessage


class CredentialRole(str, Enum):
    """What the holder of a credential may do."""

    WORKER = "worker"
    """Compute, store and move blocks of all tenants."""
    GATEWAY = "gateway"
    """Place requests and look after members; no blocks."""
    POOL_CLIENT = "pool-client"
    """Read and write blocks of one tenant, or of all, at pool nodes."""
    OPERATOR = "operator"
    """Read figures and drain pool nodes; no blocks."""


_W, _G = CredentialRole.WORKER, CredentialRole.GATEWAY
_C, _O = CredentialRole.POOL_CLIENT, CredentialRole.OPERATOR

SENDERS: dict[type[m.Message], frozenset[CredentialRole]] = {
    message: frozenset(roles)
    for roles, messages in (
        ((_W,), (
            m.StepOutputs, m.Reserved, m.BlocksPushed, m.KVReady, m.PushEnded, m.PutGranted,
            m.PinGranted, m.Asleep, m.WeightsChecked,
            m.BorrowWeights, m.WeightsLent,
            p.TakeOver, p.TakenOver, p.FindHomes, p.BlocksFound, p.BlocksRemoved,
            p.BlocksDescribed, p.PinsSet, p.PoolState,
        )),
        ((_G,), (
            m.GatewayNews, m.PeersHeard, m.Welcome, m.WhoAreYou, m.RequestTask, m.AbortTask,
            m.Prefetch, m.StopPrefetch, m.ClusterTold, p.HomesFound, p.ReplicasFound,
            m.Restart, m.CheckWeights,
        )),
        ((_W, _G), (m.DoubtPeers, m.Refused, m.AskCluster)),
        ((_W, _C), (m.PutStart, m.PutEnd, m.PinBlocks, m.Unpin)),
        ((_G, _C), (p.RemoveBlocks,)),
        ((_G, _O), (m.Drain,)),
        ((_C,), (m.Replicate, p.SetPins, p.DescribeBlocks, p.ForgetBlocks)),
        ((_C, _O), (p.FindBlocks, p.AskPool)),
        ((_W, _C, _O), (m.WorkerHello, m.LoadReport, m.BlockEvents, p.FindReplicas)),
        ((_W, _G, _C, _O), (m.PeerLost,)),
    )
    for message in messages
}  # fmt: skip
"""The roles that may send each message. A test checks that every message is listed."""

SPEAKERS: dict[type[m.Message], str] = {
    m.WorkerHello: "worker", m.LoadReport: "worker", m.BlockEvents: "worker", m.PeerLost: "worker",
    m.PutStart: "writer", m.PutEnd: "writer", m.PinBlocks: "reader", m.Unpin: "reader",
    m.Replicate: "asker", p.RemoveBlocks: "asker", p.SetPins: "asker", p.DescribeBlocks: "asker",
    p.ForgetBlocks: "asker", p.FindBlocks: "asker", p.AskPool: "asker", p.FindReplicas: "asker",
}  # fmt: skip
"""The field in which each message of a client names the client."""
KEY_FIELDS: dict[type[m.Message], tuple[str, ...]] = {
    kind: tuple(
        name
        for name in kind.__struct_fields__
        if name in ("keys", "written", "dropped", "corrupt", "head")
    )
    for kind in SENDERS
}
"""The fields in which each message of a client names blocks."""
_ABOUT_BLOCKS = frozenset(
    {
        m.PutStart, m.PutEnd, m.PinBlocks, m.Unpin, m.Replicate, m.Prefetch, p.RemoveBlocks,
        p.ForgetBlocks, p.SetPins, p.DescribeBlocks, p.FindBlocks, p.FindReplicas, p.FindHomes,
    }
)  # fmt: skip
MAX_KEYS = 1 << 15
"""How many blocks one such message may name at most: those of two million tokens."""
MAX_KEYS_AT_ONCE = 1 << 12
"""The same for a message of a pool client that its receiver handles in one piece, of about 10 ms.
Blocks of the chain before those count, too.
"""
_AT_ONCE = frozenset((m.PutStart, m.PutEnd, m.PinBlocks, m.Unpin, p.FindReplicas, p.ForgetBlocks))
MAX_NAME_CHARS = 1024
"""The longest id, epoch and address together that a client may have, because others remember them.
"""
_OF_TENANTS = frozenset(kind for kind in SENDERS if "tenant" in kind.__struct_fields__)
_WORKERS = frozenset((m.Role.PREFILL, m.Role.DECODE, m.Role.KVSTORE, m.Role.EXPERTS))
_MARK_BYTES = 6
_SCOPED = frozenset((_C, _O))


@lru_cache(maxsize=4096)
def tenant_mark(tenant: str) -> bytes:
    """Return the end of all keys that a pool client of `tenant` may name."""
    return blake2b(tenant.encode(), digest_size=_MARK_BYTES, person=b"mooncake-tenant").digest()


def tenant_key(key: BlockKey, tenant: str) -> BlockKey:
    """Return the key under which a pool client of `tenant` stores `key`. A key that already has
    this form stays as it is.

    No tenant can make, on purpose, a key of another tenant or of an engine's block: all bytes of
    those follow from hashes, and the last ones from the tenant's name.
    """
    mark = tenant_mark(tenant)
    if key.endswith(mark):
        return key
    return blake2b(key, digest_size=KEY_BYTES - _MARK_BYTES).digest() + mark


def is_clients(key: BlockKey, tenant: str) -> bool:
    """Return whether a block was stored by a pool client of this tenant alone, not by an engine."""
    return key.endswith(tenant_mark(tenant))


def channel_key_of(worker: m.WorkerRef) -> str:
    """Return the key at the end of an address; empty when it has none."""
    return worker.address.partition("#")[2]


def client_id(channel_key: str) -> str:
    """Return the prefix of the ids of clients that prove this key. So no client can take another's
    id.
    """
    return f"client-{channel_key[:12]}-"


@lru_cache(maxsize=4096)
def client_key(worker: m.WorkerRef) -> str:
    """Return the key of the certificate with which a pool client speaks; empty when `worker` is no
    client. Clients that share a credential share the key.
    """
    key = channel_key_of(worker)
    return key if key and f"{worker.worker_id}-".startswith(client_id(key)) else ""


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        found = ip_address(host.strip("[]"))
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


@lru_cache(maxsize=4096)
def _is_same_host(address: str, whence: str) -> bool:
    """Whether an address ("tcp://HOST:PORT#KEY") names the host at the other end of a
    connection.
    """
    scheme, _, place = address.partition("#")[0].partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not (port.isascii() and port.isdecimal()):
        return False  # "ipc:///HOST:PORT", say, names a file
    named, proven = _ip(host), _ip(whence)
    if named is None or proven is None:
        return False
    return named == proven or (named.is_loopback and proven.is_loopback)


def _is_long(worker: m.WorkerRef) -> bool:
    return len(worker.worker_id) + len(worker.epoch) + len(worker.address) > MAX_NAME_CHARS


@dataclass(frozen=True, kw_only=True)
class Sender:
    """The sender on a connection, as its credential describes it."""

    name: str
    roles: frozenset[CredentialRole]
    tenant: str | None
    """The tenant whose blocks a pool client may name; None: all tenants."""
    channel_key: str
    """The key, in hexadecimal, that its connections prove. Its address ends in this key."""
    may_send: frozenset[type[m.Message]] = field(init=False)
    mark: bytes = field(init=False)
    """The mark of its tenant (`tenant_mark`)."""
    own_id: str = field(init=False)
    """The prefix of its ids."""
    speaks_for_itself: bool = field(init=False)
    """Whether it may name only itself as the sender."""

    def __post_init__(self) -> None:
        allowed = frozenset(kind for kind, roles in SENDERS.items() if roles & self.roles)
        object.__setattr__(self, "may_send", allowed)
        object.__setattr__(self, "mark", tenant_mark(self.tenant or ""))
        object.__setattr__(self, "own_id", client_id(self.channel_key))
        object.__setattr__(self, "speaks_for_itself", self.roles <= _SCOPED)

    def is_own(self, worker: m.WorkerRef, whence: str, *, answers_there: bool = False) -> bool:
        """Whether `worker` can only be the sender itself: it has the key and the host that the
        connection has proven. `whence` is the IP address at the connection's other end. If answers
        go there, the address may be the key alone.
        """
        return (
            not _is_long(worker)
            and channel_key_of(worker) == self.channel_key
            and worker.worker_id.startswith(self.own_id)
            and (
                (answers_there and worker.address.startswith("#"))
                or _is_same_host(worker.address, whence)
            )
        )


def refusal(
    sender: Sender, message: AnyMessage, whence: str, *, answers_there: bool = False
) -> str | None:
    """Return why `sender` may not send `message` on a connection from the IP address `whence`.
    Returns None when it may.

    answers_there: the answer goes back on that connection, so the sender needs no address.
    """
    kind = type(message)
    if kind not in sender.may_send:
        wanted = " or ".join(sorted(role.value for role in SENDERS[kind]))
        return (
            f"{sender.name} ({', '.join(sorted(role.value for role in sender.roles))}) may not "
            f"send {kind.__name__}: it takes a credential of role {wanted}"
        )
    most = MAX_KEYS_AT_ONCE if kind in _AT_ONCE and sender.speaks_for_itself else MAX_KEYS
    if kind in _ABOUT_BLOCKS and (num_keys := _num_keys(message)) > most:
        return f"{kind.__name__} names {num_keys} blocks, more than {most}: send it in parts"
    if sender.speaks_for_itself:
        return _beyond_itself(sender, message, whence, answers_there=answers_there)
    if kind is m.WorkerHello and isinstance(message, m.WorkerHello):
        return None if message.role in _WORKERS else f"{sender.name} is no {message.role.value}"
    return None


def _beyond_itself(
    sender: Sender, message: AnyMessage, whence: str, *, answers_there: bool
) -> str | None:
    """Return why a client or operator may not send this. Returns None when it names only what is
    its own.
    """
    speaker = speaker_of(message)
    if speaker is None and type(message) in SPEAKERS:
        return f"{sender.name} does not name itself in {type(message).__name__}; a client must"
    if speaker is not None and _is_long(speaker):
        return f"{sender.name} names itself by more than {MAX_NAME_CHARS} characters"
    if speaker is not None and not sender.is_own(speaker, whence, answers_there=answers_there):
        return (
            f"{sender.name} may not speak for {speaker.worker_id} at {speaker.address} from "
            f"{whence}: a client speaks for itself, and listens at the address that it sends from"
        )
    if isinstance(message, m.WorkerHello) and message.role is not m.Role.CLIENT:
        return f"{sender.name} may join as a client only, not as {message.role.value}"
    if isinstance(message, m.BlockEvents) and (message.stored or message.removed):
        return f"{sender.name} holds no blocks for others"
    if CredentialRole.POOL_CLIENT not in sender.roles:
        return None if next(keys_in(message), None) is None else f"{sender.name} handles no blocks"
    if sender.tenant is None:
        return None
    if type(message) in _OF_TENANTS:
        tenant = getattr(message, "tenant", "")
        if tenant != sender.tenant and getattr(message, "keys", ()):
            return f"{sender.name} may store blocks of tenant {sender.tenant!r}, not of {tenant!r}"
    mark = sender.mark
    for key in keys_in(message):
        if key[-_MARK_BYTES:] != mark:
            break
    else:
        return None
    return f"{sender.name} may name keys of tenant {sender.tenant!r} only"


def _num_keys(message: AnyMessage) -> int:
    """Return how many blocks a message names. A block in two fields counts twice."""
    found = (getattr(message, name) for name in KEY_FIELDS[type(message)])
    return sum(len(each.keys if isinstance(each, m.ChainHead) else each) for each in found)


def speaker_of(message: AnyMessage) -> m.WorkerRef | None:
    """Return the sender that a message of a client names; None if it names no one."""
    named = getattr(message, SPEAKERS.get(type(message), ""), None)
    return named if isinstance(named, m.WorkerRef) else None


def keys_in(message: AnyMessage) -> Iterator[BlockKey]:
    """Yield all block keys in a message of a client."""
    for name in KEY_FIELDS[type(message)]:
        found = getattr(message, name)
        yield from found.keys if name == "head" else found
