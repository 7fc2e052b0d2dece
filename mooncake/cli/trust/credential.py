"""`mooncake credential` makes what a process can use in place of the cluster secret to prove
itself.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from mooncake.base import ConfigError
from mooncake.base.rights import CredentialRole
from mooncake.cli.command import Command
from mooncake.launch.config.options import SomeOf, above_zero, same_as, setting, text, truth
from mooncake.launch.config.settings import ServeConfig

HOLDER = "holder"
DAY_S = 86_400.0
EXAMPLES = """\
mooncake credential --role pool-client --tenant acme --name etl --days 90 --out etl.credential
mooncake credential --role operator --out operator.credential
mooncake credential --role gateway --days 365 --out gateway.credential
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    # fmt: off
    role: tuple[str, ...] = setting((), SomeOf(*(role.value for role in CredentialRole)), HOLDER,
        "ROLE", "role of the holder; may be repeated", repeat=True, required=True)
    tenant: str | None = setting(None, text, HOLDER, "NAME",
        "tenant whose blocks a pool client reads and writes")
    all_tenants: bool = setting(False, truth, HOLDER, "",
        "let a pool client read and write the blocks of all tenants")
    name: str | None = setting(None, text, HOLDER, "NAME",
        "name in logs and refusals (default: its role and tenant)")
    days: float = setting(365.0, above_zero, HOLDER, "N",
        "days that the credential is valid from now")
    out: str | None = setting(None, text, HOLDER, "FILE",
        "file to write, for this user alone (default: print it)")
    cluster_secret: str | None = same_as(ServeConfig, "cluster_secret", "cluster")
    cluster_secret_file: str | None = same_as(ServeConfig, "cluster_secret_file", "cluster")
    # fmt: on


def make(wanted: Wanted) -> int:
    """Write a credential."""
    from mooncake.identity.credential import PREFIX, issue
    from mooncake.launch.host.secrets.credentials import write_private, writing

    roles = [CredentialRole(role) for role in wanted.role]
    _check(wanted, roles)
    secret = wanted.cluster_secret or ""
    if not secret or secret.startswith(PREFIX):
        raise ConfigError(
            "cluster-secret: a credential cannot make others; give the cluster's own secret by "
            "--cluster-secret-file or MOONCAKE_CLUSTER_SECRET"
        )
    name = wanted.name or "-".join([*wanted.role, *([wanted.tenant] if wanted.tenant else [])])
    expires_s = time.time() + wanted.days * DAY_S
    credential = issue(secret, name, roles, tenant=wanted.tenant, expires_s=expires_s)
    if wanted.out is None:
        print(credential.text)
        return 0
    with writing(wanted.out):
        write_private(Path(wanted.out), credential.text + "\n")
    print(f"wrote {wanted.out}; valid until {time.strftime('%Y-%m-%d', time.gmtime(expires_s))}")
    return 0


def _check(wanted: Wanted, roles: list[CredentialRole]) -> None:
    is_client = CredentialRole.POOL_CLIENT in roles
    if is_client and (wanted.tenant is None) != wanted.all_tenants:
        raise ConfigError(
            "tenant: a pool client needs one tenant or all of them; give --tenant NAME or "
            "--all-tenants"
        )
    if not is_client and (wanted.tenant or wanted.all_tenants):
        raise ConfigError(
            "tenant: only pool clients belong to a tenant; add --role pool-client, or leave the "
            "tenant out"
        )
    if is_client and {CredentialRole.WORKER, CredentialRole.GATEWAY} & {*roles}:
        raise ConfigError(
            "role: a pool client may belong to one tenant, but workers and gateways handle all of "
            "them; make two credentials"
        )


COMMANDS = (
    Command(
        words="credential", examples=EXAMPLES, settings=Wanted, run=make,
    ),
)  # fmt: skip
