"""What stands in the environment, and what this machine says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.base import ConfigError
from mooncake.launch.host import environment, machine_facts


def test_only_what_is_missing_is_set() -> None:
    wanted = {"A": "1", "B": "2"}
    assert environment.missing(wanted, {"A": "mine"}) == {"B": "2"}
    assert environment.missing(wanted, wanted) == {}


def test_threads_sleep_and_the_heap_is_kept() -> None:
    assert environment.COMPUTE["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment.COMPUTE["MALLOC_MMAP_MAX_"] == "0"
    assert environment.COMPUTE["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert environment.QUIET["RAY_USAGE_STATS_ENABLED"] == "0"
    assert environment.QUIET["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "[::1]", "localhost"])
def test_ray_needs_no_tls_on_one_machine(host: str) -> None:
    environment.check_ray_tls(host, {}, without_tls=False)


@pytest.mark.parametrize("host", ["10.0.0.7", "0.0.0.0", "fd00::7", "head.example"])
def test_ray_speaks_in_clear_with_other_machines_only_if_told_to(host: str) -> None:
    environment.check_ray_tls(host, {}, without_tls=True)
    for set_to in ({}, {"RAY_USE_TLS": "0"}):
        with pytest.raises(ConfigError, match=r"set RAY_USE_TLS=1, .* on all machines"):
            environment.check_ray_tls(host, set_to, without_tls=False)


def test_rays_certificates_must_be_there(tmp_path: Path) -> None:
    environ = {"RAY_USE_TLS": "1"}
    for name in environment.RAY_TLS_FILES:
        for host in ("10.0.0.7", "127.0.0.1"):
            with pytest.raises(ConfigError, match=f"{name}: RAY_USE_TLS=1 needs it to name a file"):
                environment.check_ray_tls(host, environ, without_tls=True)
        environ[name] = str(tmp_path / name)
        (tmp_path / name).write_text("")
    environment.check_ray_tls("10.0.0.7", environ, without_tls=False)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("localhost", True), ("::1", True), ("127.3.2.1", True),
        ("0.0.0.0", False), ("10.0.0.1", False), ("::", False), ("node-7", False),
    ],
)  # fmt: skip
def test_loopback(host: str, loopback: bool) -> None:
    assert environment.is_loopback(host) is loopback


def test_this_machine_has_memory_cores_and_a_name() -> None:
    available = machine_facts.available_bytes()
    assert available is not None
    assert available > 0
    assert machine_facts.num_cores() >= 1
    assert machine_facts.host_name()
    assert machine_facts.boot_id() == machine_facts.boot_id()


@pytest.mark.parametrize(
    ("limit", "share"),
    [("max 100000", None), ("100000 100000", 1), ("1000 100000", 1), ("", None), (None, None)],
)
def test_a_limit_of_processor_time_counts_as_cores(
    limit: str | None, share: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit)
    assert machine_facts.num_cores(tmp_path) == (share or 4)
    (tmp_path / "cpu.max").write_text("250000 100000")
    assert machine_facts.num_cores(tmp_path) == 3
