"""Tools that `mooncake chat --tools` declares and runs: a clock, a calculator, the files of one
folder, the cluster's status. They only read, and only what the user named.

A tool returns JSON for the model; an error in it is reported to the model as {"error": ...}.
"""

from __future__ import annotations

import ast
import json
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from mooncake.base import MooncakeError
from mooncake.cli.status import STATUS_PATH
from mooncake.launch.host.http_client import Client

MAX_FILES = 100
MAX_TEXT = 2000
"""Characters of a file that the model is shown."""
MAX_EXPRESSION = 200
MAX_DIGITS = 60
"""The most digits of a number that is calculated: products of products grow without end."""

_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


class ToolFailed(Exception):
    """A tool cannot do what the model asks; the message is for the model."""


class ChatTools:
    """Runs the tools that a model calls, with a server, a folder and a clock."""

    def __init__(self, client: Client, folder: Path, clock: Callable[[], datetime]) -> None:
        self._client = client
        self._folder = folder.resolve()
        self._clock = clock
        self._tools: dict[str, tuple[str, str, Callable[[str], Any]]] = {
            "get_time": ("Get the current date and time", "", lambda _: self._time()),
            "calculate": ("Calculate an expression", "expression", calculate),
            "list_files": ("List the files of the folder", "", lambda _: self._files()),
            "read_file": ("Read a file of the folder", "path", self._text),
            "get_cluster": ("Get the status of the cluster", "", lambda _: self._cluster()),
        }

    def declarations(self) -> list[dict[str, Any]]:
        """Return the tools in the form in which the OpenAI API declares them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": described,
                    "parameters": {
                        "type": "object",
                        "properties": {key: {"type": "string"}} if key else {},
                        "required": [key] if key else [],
                    },
                },
            }
            for name, (described, key, _) in self._tools.items()
        ]

    def run(self, name: str, arguments: str) -> str:
        """Return the tool's answer to arguments in JSON, as JSON. It never raises because of the
        arguments.
        """
        try:
            answer = self._answer(name, arguments)
        except ToolFailed as failure:
            answer = {"error": str(failure)}
        # Names of files and escapes in arguments may hold what is no text in UTF-8.
        return json.dumps(answer, ensure_ascii=False).encode(errors="replace").decode()

    def _answer(self, name: str, arguments: str) -> Any:
        if name not in self._tools:
            raise ToolFailed(f"there is no tool {name!r}")
        _, key, work = self._tools[name]
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ToolFailed("the arguments are not JSON") from None
        value = given.get(key, "") if isinstance(given, dict) else ""
        if key and not (isinstance(value, str) and value):
            raise ToolFailed(f"{key} is missing, or is not a text")
        return work(value)

    def _time(self) -> Any:
        now = self._clock()
        return {"date": f"{now:%Y-%m-%d}", "time": f"{now:%H:%M}"}

    def _files(self) -> Any:
        try:
            found = sorted(
                f"{path.name}/" if path.is_dir() else path.name for path in self._folder.iterdir()
            )
        except OSError as error:
            raise ToolFailed(f"the folder cannot be read: {error.strerror}") from None
        shown = [name for name in found if not name.startswith(".")]
        left_out = {"left_out": len(shown) - MAX_FILES} if len(shown) > MAX_FILES else {}
        return {"files": shown[:MAX_FILES], **left_out}

    def _text(self, path: str) -> Any:
        """Return the beginning of a text file, which has to lie in the folder, also after links are
        followed.
        """
        try:
            real = (self._folder / path).resolve()
            if not real.is_relative_to(self._folder):
                raise ToolFailed(f"{path} is not in the folder")
            if not real.is_file():
                raise ToolFailed(f"there is no file {path}")
            with real.open(encoding="utf-8") as file:
                text = file.read(MAX_TEXT + 1)
        except (UnicodeDecodeError, ValueError):
            raise ToolFailed(f"{path} is not a text file") from None
        except OSError as error:
            raise ToolFailed(f"{path} cannot be read: {error.strerror}") from None
        return {"text": text[:MAX_TEXT], **({"cut": True} if len(text) > MAX_TEXT else {})}

    def _cluster(self) -> Any:
        try:
            status = self._client.get(STATUS_PATH)
        except MooncakeError as error:
            raise ToolFailed(error.message) from None
        roles = Counter(str(worker.get("role")) for worker in status.get("workers", []))
        return {"gateways": len(status.get("gateways", [])), **roles}


def calculate(expression: str) -> Any:
    """Return {"result": number} of a sum with + - * / // % and brackets.

    Raises:
        ToolFailed: it is not a sum, it is too long, or its result cannot be shown as a number.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ToolFailed(f"the expression has more than {MAX_EXPRESSION} characters")
    try:
        result = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolFailed(f"{expression} is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolFailed("division by zero") from None
    except OverflowError:
        raise ToolFailed("the numbers are too large") from None
    return {"result": int(result) if result == int(result) else round(result, 6)}


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        made: Any = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        made = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        made = _OPERATORS[type(node.op)](_value(node.operand))
    else:
        raise ValueError("not arithmetic")
    if abs(made) >= 10**MAX_DIGITS:
        raise OverflowError
    return made
