"""The packages for traces are needed where traces are asked for, and nowhere else."""

from __future__ import annotations

import sys

import pytest

from mooncake.base import ConfigError
from mooncake.launch.cluster.gateways.gateway_process import check_traces
from mooncake.launch.config.config import resolve

ASKED = {"model": "m", "otlp_traces_endpoint": "http://localhost:4318"}
OTLP = "mooncake.telemetry.otlp"


def test_where_the_packages_are_missing_the_error_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, OTLP, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'mooncake-serve\[otlp\]'"):
        check_traces(resolve(ASKED, None, {}))


def test_without_the_flag_nothing_of_them_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, OTLP, None)  # an import of it would raise
    check_traces(resolve({"model": "m"}, None, {}))


def test_variables_of_the_packages_that_are_wrong_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "256")  # fewer than go out at once
    with pytest.raises(ConfigError, match="a variable OTEL_… is wrong"):
        check_traces(resolve(ASKED, None, {}))


def test_with_the_packages_it_may_start() -> None:
    check_traces(resolve(ASKED, None, {}))
