"""The deepest schema that is let in does not overflow the stack of the thread that checks it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from tests.support.waiting import LONG_S

PROGRAM = """
import json, sys, threading
from mooncake.api.constrained.grammar import json_rule

schema = json.loads(sys.argv[1])
thread = threading.Thread(target=lambda: print(bool(json_rule(schema, "schema")), flush=True))
thread.start()
thread.join()
"""


def test_schemas_are_checked_where_threads_get_small_stacks() -> None:
    """Without a limit on the stack of processes, glibc gives threads 2 MiB: too little for it."""
    if resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY:
        pytest.skip("the hard limit on stacks keeps this process from having none")
    count = 260
    definitions: dict[str, object] = {
        f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}, "required": ["a"]}
        for n in range(count)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "string"}}}
    done = subprocess.run(
        ["sh", "-c", 'ulimit -s unlimited; exec "$@"', "sh", sys.executable, "-c", PROGRAM,
         json.dumps(schema)],
        capture_output=True, text=True, timeout=LONG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"
