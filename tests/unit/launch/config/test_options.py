"""How settings are read: the same from a flag and from a file, refused with their name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import ConfigError
from mooncake.engine.config import SpeculativeConfig
from mooncake.launch.config import options


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("7", 7), (7, 7), ("32k", 32_000), ("32K", 32_768), ("2m", 2_000_000), ("2M", 2 * 2**20),
        (" 5 ", 5),
    ],
)  # fmt: skip
def test_counts(written: object, number: int) -> None:
    assert options.count(0)("max_model_len", written) == number


@pytest.mark.parametrize("written", ["", "x", "1.5", 1.5, "k", "1kk", True, None, "1e3", "0x10"])
def test_what_is_no_count(written: object) -> None:
    with pytest.raises(ConfigError, match=r"max-model-len: .* is not a whole number"):
        options.count(0)("max_model_len", written)


@given(st.integers(-1000, 1000), st.integers(-1000, 1000))
def test_counts_keep_their_range(minimum: int, number: int) -> None:
    read = options.count(minimum, minimum + 100)
    if minimum <= number <= minimum + 100:
        assert read("port", number) == number
    else:
        with pytest.raises(ConfigError, match=f"port: must be at least {minimum} and at most"):
            read("port", str(number))


@pytest.mark.parametrize(
    ("read", "written", "value"),
    [
        (options.size(1), "1GiB", 2**30),
        (options.size(1), 4096, 4096),
        (options.positive, "0.5", 0.5),
        (options.web_url, "http://h:4318", "http://h:4318"),
        (options.web_url, "https://[::1]/v1/traces", "https://[::1]/v1/traces"),
        (options.positive, 3, 3.0),
        (options.truth, True, True),
        (options.truth, "Yes", True),
        (options.truth, "off", False),
        (options.text, "a b", "a b"),
        (options.text, 5, "5"),
        (options.texts, "one", ("one",)),
        (options.texts, ["one", "two"], ("one", "two")),
        (options.OneOf("a", "b"), "b", "b"),
        (options.SomeOf("tcp", "shm"), "shm,tcp", ("shm", "tcp")),
        (options.SomeOf("tcp", "shm"), ["tcp", "tcp"], ("tcp",)),
        (options.host_and_port, "node-1:6379", "node-1:6379"),
        (options.host_and_port, "[::1]:80", "[::1]:80"),
        (options.port_range, "7000-7099", (7000, 7099)),
        (options.port_range, "7000-7000", (7000, 7000)),
        (options.part, "0", 0.0),
        (options.part, 0.5, 0.5),
        (options.quotas, "a=1KiB,b=0", (("a", 1024), ("b", 0))),
        (options.quotas, ["a=b=1"], (("a=b", 1),)),
        (options.nearby, "cpu:0=a, b", (("cpu:0", ("a", "b")),)),
        (options.labels, "rack=r7, kind=h200", ("kind=h200", "rack=r7")),
        (options.labels, {"rack": 7, "kind": "h200"}, ("kind=h200", "rack=7")),
        (
            options.nearby,
            ["anywhere=a", "gpu:0000:3b:00.0=b"],
            (("anywhere", ("a",)), ("gpu:0000:3b:00.0", ("b",))),
        ),
        (options.disks, "/mnt/a/:1KiB", (("/mnt/a", 1024),)),
        (options.disks, ["/a:1", "b:c:2,/d:3"], (("/a", 1), ("b:c", 2), ("/d", 3))),
    ],
)
def test_values(read: Callable[[str, object], Any], written: object, value: object) -> None:
    assert read("name", written) == value


@pytest.mark.parametrize(
    ("read", "written", "message"),
    [
        (options.size(1), "lots", "is not a size"),
        (options.size(1), True, "is not a size"),
        (options.size(1), 1.5, "is not a size"),
        (options.size(100), "1b", "at least 100 bytes"),
        (options.positive, "0", "not a number above zero"),
        (options.web_url, "h:4318", "is not a URL of a server"),
        (options.web_url, "http://:4318", "is not a URL of a server"),
        (options.web_url, "http://h:99999", "is not a URL of a server"),
        (options.web_url, "grpc://h:4317", "is not a URL of a server"),
        (options.web_url, "http://[::1", "is not a URL of a server"),
        (options.positive, "-1", "not a number above zero"),
        (options.positive, "nan", "not a number above zero"),
        (options.positive, "inf", "not a number above zero"),
        (options.positive, True, "not a number above zero"),
        (options.positive, "soon", "not a number above zero"),
        (options.truth, "maybe", "neither true nor false"),
        (options.truth, 2, "neither true nor false"),
        (options.text, "", "is not a text"),
        (options.text, ["x"], "is not a text"),
        (options.text, True, "is not a text"),
        (options.texts, [], "needs at least one value"),
        (options.OneOf("bfloat16", "float32"), "bfloat", r"did you mean bfloat16\?"),
        (options.SomeOf("tcp", "shm"), "shm,rdma", "'rdma' is not one of tcp, shm"),
        (options.nearby, "cpu0=a", "'cpu0=a' is not PLACE=NIC,NIC"),
        (options.nearby, "cpu:0=", "is not PLACE=NIC,NIC"),
        (options.labels, "rack", "'rack' is not KEY=VALUE"),
        (options.labels, {"rack": "r7,r8"}, "'r8' is not KEY=VALUE"),
        (options.labels, {"gpu": True}, "True is not a text"),
        (options.labels, "rack=1,rack=2", "rack is named twice"),
        (options.nearby, ["cpu:0=a", "cpu:0=b"], "cpu:0 is named twice"),
        *(
            (options.port_range, text, "is not FIRST-LAST")
            for text in (
                "7000",
                "7099-7000",
                "0-9",
                "7000-70000",
                "a-b",
                (7000, 7099),
            )
        ),
        (options.host_and_port, "node-1", "is not HOST:PORT"),
        (options.host_and_port, ":80", "is not HOST:PORT"),
        (options.host_and_port, "node:http", "is not HOST:PORT"),
        (options.host_and_port, "node:70000", "is not HOST:PORT"),
        (options.part, "1.1", "more than the whole"),
        (options.part, "-0.1", "not a number above zero"),
        (options.quotas, "alice", "'alice' is not TENANT=SIZE"),
        (options.quotas, "alice=lots", "is not a size"),
        (options.quotas, "a=1,a=2", "'a' is named twice"),
        (options.disks, "/mnt/nvme0", "'/mnt/nvme0' is not DIR:SIZE"),
        (options.disks, "/mnt/nvme0:", "is not a size"),
        (options.disks, "/mnt/nvme0:much", "is not a size"),
        (options.disks, "/a:1KiB,/a/:2KiB", "/a is named twice"),
    ],
)
def test_refusals_name_the_setting(
    read: Callable[[str, object], Any], written: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        read("some_name", written)
    assert refusal.value.message.startswith("some-name")


def test_a_setting_carries_what_is_known_of_it() -> None:
    @dataclasses.dataclass
    class Some:
        port: int = options.setting(8, options.count(1), "door", "N", "where", short="-p")
        plain: int = 0

    known = options.options_of(Some)
    assert set(known) == {"port"}
    option, default = known["port"]
    assert (default, option.group, option.metavar, option.short) == (8, "door", "N", "-p")
    assert Some().port == 8


def test_the_nearest_word() -> None:
    assert options.nearest("prot", ["port", "host"]) == " (did you mean port?)"
    assert options.nearest("zzz", ["port", "host"]) == ""


NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize("written", ['{"method": "ngram", "num_speculative_tokens": 4}', NGRAM])
def test_a_table_is_json_on_the_command_line_and_a_mapping_in_a_file(written: object) -> None:
    read = options.table(SpeculativeConfig)
    made = read("speculative_config", written)
    assert made == SpeculativeConfig(**NGRAM)
    assert read("speculative_config", made) is made


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{", r"speculative-config: '{' is not JSON: "),
        (
            "[1]",
            r"speculative-config: '\[1\]' is not a JSON object of method, num_speculative_tokens",
        ),
        ({**NGRAM, "methd": 1}, r"'methd' is not one of .* \(did you mean method\?\)"),
        ({"method": "ngram"}, "speculative-config: num_speculative_tokens is missing"),
        ({**NGRAM, "method": "eagle"}, "speculative-config: method: 'eagle' is not one of ngram"),
    ],
)
def test_a_wrong_table_is_refused(written: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.table(SpeculativeConfig)("speculative_config", written)
