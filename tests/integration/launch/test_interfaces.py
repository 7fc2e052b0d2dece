"""All addresses of this machine are found on the interfaces that ip(8) names."""

from __future__ import annotations

import json

import pytest

from mooncake.launch.host.interfaces import interface_of
from tests.support.namespaces import ip


def test_addresses_are_where_ip_says() -> None:
    try:
        links = json.loads(ip("-json", "address"))
    except OSError as error:
        pytest.skip(f"no ip(8): {error}")
    has = {
        address["local"]: link["ifname"]
        for link in links
        for address in link.get("addr_info", [])
        if address["scope"] != "link"  # several may have the same
    }
    assert {address: interface_of(address) for address in has} == has
