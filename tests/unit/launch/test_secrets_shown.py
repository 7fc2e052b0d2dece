"""Nothing that prints settings prints the cluster secret: not repr, not rich, not a log line."""

from __future__ import annotations

import pytest
from rich.pretty import pretty_repr

from mooncake.launch.pool_client.session import PoolSessionConfig
from tests.support.serve.plain_settings import LAYOUT, worker_settings

SETTINGS = (
    worker_settings(cluster_secret="hush"),
    PoolSessionConfig(gateway_address="tcp://127.0.0.1:1", cluster_secret="hush", layout=LAYOUT),
)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: type(settings).__name__)
def test_the_secret_is_not_shown(settings: object) -> None:
    for shown in (repr(settings), str(settings), pretty_repr(settings), pretty_repr([settings])):
        assert "hush" not in shown
        assert type(settings).__name__ in shown
