"""Grammars that would keep the library busy for hours, or overflow a small stack, cost their own
sequence and nothing else.

In processes of their own: the library cannot be stopped, and an overflow ends its process.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from tests.support.waiting import LONG_S

PROGRAM = """
import os

from mooncake.base import Grammar, InternalError
from tests.support.api.grammars import allowed_next, grammar_of, tiny_grammars

text = "start: A\\nA: " + " & ".join(f"/([a-z ]*{c}[a-z ]{{12}})*/" for c in "abcdefghij")
grammars = tiny_grammars(limit_s=0.5)
bomb = Grammar(text=text, end_ids=[0])
follower, other = grammars.follow(bomb, []), grammars.follow(grammar_of("/[ab]/"), [])
print("others go on:", bool(allowed_next(other)))
for _ in range(2):
    try:
        follower.allowed()
    except InternalError as error:
        print(error)
    follower = grammars.follow(bomb, [])
print("and later ones:", bool(allowed_next(grammars.follow(grammar_of("/[ab]/"), []))), flush=True)
os._exit(0)
"""


def test_a_grammar_that_never_ends_fails_its_own_sequence_and_no_other() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=LONG_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "others go on: True",
        "the grammar takes more than 0.5 s",
        "the grammar has exceeded its time before",
        "and later ones: True",
    ]


DEEP = """
import os, sys

from mooncake.api.constrained.grammar import json_rule
from tests.support.api.grammars import allowed_next, grammar_of, tiny_grammars

rule = json_rule(__import__("json").loads(sys.argv[1]), "schema")
print(bool(allowed_next(tiny_grammars().follow(grammar_of(rule), []))), flush=True)
os._exit(0)
"""


def test_the_deepest_schema_let_in_compiles_where_threads_get_small_stacks() -> None:
    """Without a limit on the stack of processes, glibc gives threads 2 MiB: too little for it."""
    count = 260
    definitions: dict[str, object] = {
        f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}, "required": ["a"]}
        for n in range(count)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "string"}}}
    if resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY:
        pytest.skip("the hard limit on stacks keeps this process from having none")
    done = subprocess.run(
        ["sh", "-c", 'ulimit -s unlimited; exec "$@"', "sh", sys.executable, "-c", DEEP,
         json.dumps(schema)],
        capture_output=True, text=True, timeout=LONG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"
