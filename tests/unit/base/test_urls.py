"""URLs of servers, and errors that say how to write one."""

from __future__ import annotations

import pytest

from mooncake.base import ConfigError
from mooncake.base.urls import ServerUrl, server_url


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("http://h", ServerUrl(False, "h", 80, "h", "")),
        ("https://me:secret@h/v1/", ServerUrl(True, "h", 443, "h", "/v1")),
        ("http://[::1]:8000/", ServerUrl(False, "::1", 8000, "[::1]:8000", "")),
    ],
)
def test_a_url_names_a_server(url: str, read: ServerUrl) -> None:
    assert server_url("url", url) == read


@pytest.mark.parametrize(
    "url", ["h:8000", "http://", "http://:8000", "ftp://h", "http://h:99999", "http://h:0",
            "http://h:port", "http://[::1", ""]
)  # fmt: skip
def test_what_names_none_is_an_error_that_names_the_setting(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^signer: '.*' is not a URL of a server"):
        server_url("signer", url)


def test_a_server_may_take_one_scheme_only() -> None:
    with pytest.raises(ConfigError, match="write it like http://"):
        server_url("signer", "https://h", ("http",))
