"""Whether the health ports that `mooncake status` shows can be reached from where it is asked."""

from __future__ import annotations

import json
import re
import sys

from tests.support.hosts.described import MOONCAKE
from tests.support.hosts.hosts import Host

GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=240).status)"


def assert_health_ports_are_where_status_says(host: Host, url: str, names: set[str]) -> None:
    """Ask each worker's health port from `host` at what `mooncake status` shows there."""
    status = [MOONCAKE, "status", "--url", url.removesuffix("/v1")]
    workers = json.loads(host.check(*status, "--json"))["workers"]
    shown = host.check("env", "COLUMNS=300", *status)
    assert {each["host"] for each in workers} == names
    for each in workers:
        address = each["health_url"]
        assert f"{address.removeprefix('http://')}\n" in re.sub(" +\n", "\n", shown)
        assert host.check(sys.executable, "-c", GET, f"{address}/health/ready").strip() == "200"
