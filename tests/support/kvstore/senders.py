"""Who has proven what on the data connection of a pool node: a worker, and a client."""

from __future__ import annotations

from mooncake.base import WorkerRef
from mooncake.base.rights import CredentialRole, Sender, client_id

CHANNEL_KEY = "cd" * 32
HERE = "127.0.0.1"
CLIENT = WorkerRef(f"{client_id(CHANNEL_KEY)}1", "e1", f"tcp://{HERE}:7#{CHANNEL_KEY}")
WORKERS = Sender(
    name="w", roles=frozenset((CredentialRole.WORKER,)), tenant=None, channel_key="ab" * 32
)


def client_of(tenant: str | None) -> Sender:
    """Return what the client has proven if its credential is of this tenant."""
    return Sender(
        name="c", roles=frozenset((CredentialRole.POOL_CLIENT,)), tenant=tenant,
        channel_key=CHANNEL_KEY,
    )  # fmt: skip
