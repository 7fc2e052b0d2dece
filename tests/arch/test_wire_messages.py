"""Releases of one protocol version work together: what they send only ever gains fields that have a
default, and messages.
"""

from __future__ import annotations

import pytest

from tests.support.wire_schema import Schema, breaks, present, recorded

OLD: Schema = {
    "Ask": ["tag ask", "key: str needed", "count: int"],
    "Place": ["in order", "host: str needed"],
    "Tier": ["dram", "ssd"],
}


def test_what_is_sent_is_what_is_recorded() -> None:
    assert breaks(recorded(), present()) == []
    assert present() == recorded(), "record it: python -m tests.support.wire_schema --write"


def test_the_record_holds_all_that_messages_are_made_of() -> None:
    schema = present()
    for name in ("RequestTask", "GenerateRequest", "SamplingParams", "BlockPlaces", "WorkerRef"):
        assert schema[name], name
    assert "in order" in schema["WorkerRef"]


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        ("Ask", ["tag ask", "key: str needed"], "Ask: count: int is gone"),
        ("Ask", [*OLD["Ask"], "more: int needed"], "Ask: more: int needed has no default"),
        ("Ask", ["tag ask", "key: int needed", "count: int"], "Ask: key: str needed is gone"),
        ("Place", ["in order", "rack: str", *OLD["Place"][1:]], "Place: new fields belong behind"),
        ("Tier", ["ssd"], "Tier: dram is gone"),
        ("Ask", [], "Ask: tag ask is gone"),
    ],
)
def test_what_would_break_an_update_is_named(name: str, fields: list[str], problem: str) -> None:
    assert problem in "\n".join(breaks(OLD, {**OLD, name: fields}))


def test_new_fields_with_a_default_and_new_messages_break_nothing() -> None:
    new = {
        **OLD, "Ask": [*OLD["Ask"], "more: int"], "Place": [*OLD["Place"], "rack: str"],
        "Tell": ["tag tell", "key: str needed"], "Tier": [*OLD["Tier"], "tape"],
    }  # fmt: skip
    assert breaks(OLD, new) == []
