"""Whether a generated answer is right: the rules of `mooncake eval` for lm-eval's harness.

Read by the harness in its own environment: only the standard library is there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

CALL = re.compile(
    r"<\|tool_call_begin\|>functions\.(\S+?):\d+<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>",
    re.DOTALL,
)


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return lm-eval's metric of one answer.

    doc: `right` are the texts that are, or the calls as JSON where `calls` is true.
    """
    answer = results[0].rpartition("</think>")[2]
    calls = [[name, _json(arguments)] for name, arguments in CALL.findall(answer)]
    if doc["calls"] or calls:
        return {"right": float(doc["calls"] and calls == json.loads(doc["right"][0]))}
    if doc["is_json"]:
        return {"right": float(_json(answer) == _json(doc["right"][0]))}
    return {"right": float(_plain(answer) in map(_plain, doc["right"]))}


def _plain(text: str) -> str:
    return " ".join(text.split()).rstrip(".").lower()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
