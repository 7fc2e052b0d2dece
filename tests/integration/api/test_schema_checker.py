"""The process that checks answers: hostile schemas end it, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mooncake.api.constrained import checker as checker_module
from mooncake.api.constrained.checker import Fault, SchemaChecker, SchemaToCheck
from tests.support.slowness import slowness
from tests.support.waiting import LONG_S

TIGHT_S = 0.2
"""CPU time on a usual machine, for what takes a few milliseconds."""
UNIQUE: dict[str, Any] = {"type": "array", "uniqueItems": True}


def doubling(depth: int) -> dict[str, Any]:
    """Return a schema whose references double at each of `depth` levels."""
    levels: dict[str, Any] = {f"a{depth}": {"type": "integer"}}
    for level in range(depth):
        ref = {"$ref": f"#/$defs/a{level + 1}"}
        levels[f"a{level}"] = {"oneOf": [{"not": ref}, {"allOf": [ref, ref]}]}
    return {"$ref": "#/$defs/a0", "$defs": levels}


HOSTILE: dict[str, tuple[Any, Any]] = {
    "a pattern that backtracks": ({"pattern": "^(a|a)*$", "not": {}}, "a" * 60 + "b"),
    "choices within choices": (doubling(40), 1),
    "many names to many patterns": (
        {"patternProperties": {f"(a*)*{n}$": {} for n in range(50)}}, {"a" * 40: 1},
    ),
    "many items that are alike": (
        UNIQUE, [{"a": [{"b": n}, [n % 7] * 50]} for n in range(3_000)],
    ),
    "a message that fills the memory": (
        {"anyOf": [{"not": {}}] * 50_000}, "x" * 100_000,
    ),
}  # fmt: skip


@pytest.fixture
def checker() -> Iterator[SchemaChecker]:
    made = SchemaChecker(
        cpu_limit_s=TIGHT_S * slowness(), wall_limit_s=LONG_S, queue_limit_s=LONG_S
    )
    yield made
    made.close()


def check(checker: SchemaChecker, schema: Any, value: Any) -> list[Fault]:
    return asyncio.run(checker.check(SchemaToCheck.of(schema), json.dumps(value)))


def reasons(faults: list[Fault]) -> list[tuple[str | None, str]]:
    return [(fault.keyword, fault.message) for fault in faults]


def test_faults_have_a_place_and_a_keyword(checker: SchemaChecker) -> None:
    schema = {"properties": {"a/b": {"type": "array", "items": UNIQUE}}, "maxProperties": 1}
    found = check(checker, schema, {"a/b": [[1], [1, 1]], "~": 0})
    assert {(fault.path, fault.keyword) for fault in found} == {
        ("/a~1b/1", "uniqueItems"),
        ("", "maxProperties"),
    }
    assert check(checker, schema, {"a/b": [[1], [1, 2]]}) == []


def test_long_faults_are_cut_and_few(checker: SchemaChecker) -> None:
    found = check(checker, {"items": {"not": {}}}, ["x" * 1000] * 100)
    assert len(found) == 5
    assert all(len(fault.message) <= 300 for fault in found)


def test_drafts_are_told_apart(checker: SchemaChecker) -> None:
    old = {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}}
    assert [fault.keyword for fault in check(checker, old, {"a": 1})] == ["dependencies"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_given_up(checker: SchemaChecker, name: str) -> None:
    schema, value = HOSTILE[name]
    [fault] = check(checker, schema, value)
    assert (fault.keyword, fault.message) == (None, "not checked: it took too much time or memory")
    assert check(checker, UNIQUE, [1]) == [], "the next one is checked by another process"
    [again] = check(checker, schema, value)
    assert again.message == "not checked: this schema took too long before"


def test_one_that_fills_the_memory_is_given_up_however_long_it_may_take() -> None:
    patient = SchemaChecker(cpu_limit_s=200.0, wall_limit_s=200.0)
    try:
        [fault] = check(patient, {"anyOf": [{"not": {}}] * 20_000}, "x" * 100_000)
    finally:
        patient.close()
    assert fault.message.startswith("not checked: MemoryError")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "#"}, "RecursionError"),
        ({"properties": {"a": {"$ref": "#/nowhere"}}}, "which it does not have"),
        ({"type": 5}, "not checked: "),
        ({"pattern": "("}, "not checked: "),
    ],
)
def test_schemas_with_no_answer(checker: SchemaChecker, schema: Any, said: str) -> None:
    [fault] = check(checker, schema, {"a": 1} if "pattern" not in schema else "x")
    assert fault.keyword is None
    assert said in fault.message
    assert check(checker, UNIQUE, [1]) == []


def test_nothing_is_fetched(checker: SchemaChecker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.01)
        host, port = listener.getsockname()
        [fault] = check(checker, {"$ref": f"http://{host}:{port}/x.json"}, 1)
        assert "which it does not have" in fault.message
        with pytest.raises(TimeoutError):
            listener.accept()


def test_the_process_knows_no_secrets(
    checker: SchemaChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_CLUSTER_SECRET", "hidden")
    assert check(checker, UNIQUE, [1]) == []
    process = checker._process
    assert process is not None
    with open(f"/proc/{process.pid}/environ", "rb") as environment:
        assert b"hidden" not in environment.read()


def test_a_process_that_was_killed_is_replaced(checker: SchemaChecker) -> None:
    assert check(checker, UNIQUE, [1]) == []
    assert checker._process is not None
    checker._process.kill()
    checker._process.wait()
    assert reasons(check(checker, UNIQUE, [1, 1]))[0][0] == "uniqueItems"


def test_waiting_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "MAX_WAITING", 8)
    hurried = SchemaChecker(queue_limit_s=0.0)
    schema = SchemaToCheck.of(UNIQUE)

    busy = threading.Event()
    hurried._pool.submit(busy.wait)

    async def main() -> list[list[Fault]]:
        tasks = [asyncio.ensure_future(hurried.check(schema, "[]")) for _ in range(8)]
        await asyncio.sleep(0)  # all have asked
        busy.set()
        return await asyncio.gather(*tasks)

    try:
        found = asyncio.run(main())
    finally:
        hurried.close()
    told = [reasons(each)[0][1] if each else "" for each in found]
    assert told[4:] == ["not checked: too many answers wait to be checked"] * 4
    assert set(told[:4]) <= {"", "not checked: others took all the time"}


def test_a_tenant_with_costly_schemas_waits_behind_itself(checker: SchemaChecker) -> None:
    """Others are served before its second one, though all of its came first."""
    costly = [doubling(40 + n) for n in range(4)]
    order: list[str] = []

    async def ask(tenant: str, schema: Any) -> None:
        await checker.check(SchemaToCheck.of(schema), "1", tenant)
        order.append(tenant)

    async def main() -> None:
        tasks = [asyncio.ensure_future(ask("flood", schema)) for schema in costly]
        tasks += [asyncio.ensure_future(ask(name, UNIQUE)) for name in ("a", "b", "a")]
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert [order[0], sorted(order[1:4]), order[4:]] == ["flood", ["a", "a", "b"], ["flood"] * 3]


def test_closing_ends_the_process() -> None:
    made = SchemaChecker()
    assert check(made, UNIQUE, [1]) == []
    assert made._process is not None
    pid = made._process.pid
    made.close()
    made.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    [fault] = check(made, UNIQUE, [1])
    assert fault.message == "not checked: the server is shutting down"
