"""`mooncake ranks` computes stages of engines that workers on other machines lead."""

from __future__ import annotations

import dataclasses
import signal
import sys

from mooncake.base import ConfigError
from mooncake.base.rights import CredentialRole
from mooncake.cli.command import Command
from mooncake.launch.config.options import count, positive, same_as, setting, text
from mooncake.launch.config.settings import ServeConfig

GROUP = "cluster"
EXAMPLES = """\
mooncake ranks --bind-host 10.0.0.8 --port 7100 --cluster-secret-file secret
mooncake serve DIR -pp 2 --bind-host 10.0.0.7 --stage-hosts 10.0.0.8:7100 \
--cluster-secret-file secret
"""
NOTES = """\
The checkpoint must be at the same path on all machines. Each rank on a GPU gets one of the GPUs
that this process sees. The connections between the ranks of an engine are not encrypted and prove
no identity: use a network that others cannot reach."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranks:
    # fmt: off
    bind_host: str = setting("127.0.0.1", text, GROUP, "HOST",
        "address of this machine on which ranks listen")
    port: int = setting(7100, count(0, 65535), GROUP, "N",
        "port at which workers ask for ranks; 0: any free port, which is printed")
    shutdown_timeout: float = setting(30.0, positive, GROUP, "S",
        "seconds that ranks may still compute after SIGTERM, unless their leads have gone before")
    cluster_secret: str | None = same_as(ServeConfig, "cluster_secret", GROUP)
    cluster_secret_file: str | None = same_as(ServeConfig, "cluster_secret_file", GROUP)
    audit_log: str | None = same_as(ServeConfig, "audit_log", GROUP)
    # fmt: on


def run(wanted: Ranks) -> int:
    """Start ranks for workers until SIGTERM or Ctrl-C."""
    from mooncake.identity.credential import own_credential
    from mooncake.launch.host.processes.end_signals import EndSignals
    from mooncake.launch.host.processes.vital_threads import end_with_vital_threads
    from mooncake.launch.host.secrets.secret_file import SecretFollower
    from mooncake.launch.worker.ranks.rank_host import RankHost
    from mooncake.telemetry.audit import configure_audit
    from mooncake.telemetry.log import configure_logging

    if not wanted.cluster_secret:
        raise ConfigError(
            "cluster-secret: ranks let in only workers that know their cluster's secret; give it "
            "by --cluster-secret-file or MOONCAKE_CLUSTER_SECRET"
        )
    if wanted.bind_host in ("0.0.0.0", "::"):
        raise ConfigError(
            "bind-host: ranks do not check who connects to them, so they do not listen on "
            f"{wanted.bind_host}, which is every network; give one address"
        )
    configure_logging("ranks", sys.stderr)
    configure_audit("ranks", wanted.audit_log)
    end_with_vital_threads()
    credential = own_credential(wanted.cluster_secret, CredentialRole.WORKER, name="ranks")
    host = RankHost(wanted.bind_host, wanted.port, credential)
    following = SecretFollower(wanted.cluster_secret_file, credential.renew)
    signals = EndSignals()

    def on_signal(number: int, _: object) -> None:
        is_first = not signals.has_come
        if signals.hurries(number):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        elif is_first:
            host.close()

    signal.signal(signal.SIGTERM, on_signal)
    print(f"ranks are started at {wanted.bind_host}:{host.port}", flush=True)
    host.run()
    host.finish(wanted.shutdown_timeout)
    following.close()
    return 0


COMMANDS = (
    Command(
        words="ranks", examples=EXAMPLES, notes=NOTES, settings=Ranks, run=run,
    ),
)  # fmt: skip
