"""What documents are made of: every command and flag, described from the settings themselves."""

from __future__ import annotations

from mooncake.cli.registry import describe
from mooncake.launch.config import options
from mooncake.launch.config.bench_settings import BenchServe
from mooncake.launch.config.settings import ServeConfig
from mooncake.scheduler.config import SchedulerConfig

COMMANDS = {command.words: command for command in describe()}


def flag(command: str, name: str) -> tuple[str, str, list[str]]:
    [found] = [flag for flag in COMMANDS[command].flags if name in flag.names]
    return found.default, found.key, found.option.variables


def test_every_setting_is_described() -> None:
    names = {name for flag in COMMANDS["serve"].flags for name in flag.names}
    assert len(COMMANDS["serve"].flags) == len(options.options_of(ServeConfig))
    assert {"model", "--port", "--kvstore-dram-bytes", "--dram", "-tp"} <= names
    assert all(flag.option.text for command in COMMANDS.values() for flag in command.flags)


def test_defaults_keys_and_variables() -> None:
    assert flag("serve", "--port") == ("8000", "port", [])
    assert flag("serve", "--api-key") == ("", "api-key", ["MOONCAKE_API_KEY"])
    assert flag("status", "--url") == ("http://127.0.0.1:8000", "", [])
    assert flag("pool bench", "--batch") == ("16", "batch", [])
    assert flag("trace cache", "--policy") == ("lru", "", [])


def test_what_is_taken_for_compatibility_only_is_hidden() -> None:
    assert "trust_remote_code" in options.options_of(BenchServe)
    shown = [flag.key for flag in COMMANDS["bench serve"].flags]
    assert "trust-remote-code" not in shown


def test_defaults_are_those_of_the_structs_that_own_them() -> None:
    config = ServeConfig(model="m", slo_tbt_ms=80.0)
    values = options.values_of(config, SchedulerConfig)
    assert values["tbt_slo_s"] == 0.08
    assert SchedulerConfig(**values | {"tbt_slo_s": None}) == SchedulerConfig()
    assert flag("simulate", "--slo-tbt-ms")[0] == "100.0"
