"""Weaker schemas, for grammars that cannot follow the whole one: each admits every value that is
valid against the original. Pure.

A keyword that restricts values may be left out if its schema restricts the value. If it matters
that a schema is *not* met (`not`, `if`), the whole keyword around it is left out. An answer made
under a weaker schema is checked against the original when it is finished (`generation.review`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mooncake.api.constrained.schema_graph import (
    MAPS_OF_SCHEMAS,
    MAX_NESTING,
    MAX_REFERENCE_CHARS,
    PLAIN_VALUES,
    follow_reference,
)

NOT_FOLLOWED = frozenset(
    {
        "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains", "dependencies",
        "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
    }
)  # fmt: skip
"""The keywords of JSON Schema that the grammar library does not follow."""
MAX_TRIED_PATTERNS = 100
"""Patterns of one request that are tried. Further ones are left out of schemas that cannot be
followed with all patterns.
"""

_HOLDERS = frozenset({"additionalItems", "additionalProperties", "items"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MOVED = NOT_FOLLOWED | {"oneOf", "patternProperties"}
"""Keywords whose content is elsewhere in the weaker schema, so that references into it are left
out.
"""
_OFFICIAL = ("http://json-schema.org/", "https://json-schema.org/")


class PatternTrials:
    """Remembers which patterns of one request can be followed. Each is tried once, and at most
    `MAX_TRIED_PATTERNS` are tried: compiling one may take milliseconds.
    """

    def __init__(self, can_follow: Callable[[str], bool]) -> None:
        self._can_follow = can_follow
        self._known: dict[str, bool] = {}

    def keep(self, pattern: str) -> bool:
        """Return whether `pattern` is known to be followable."""
        if pattern not in self._known:
            if len(self._known) >= MAX_TRIED_PATTERNS:
                return False
            self._known[pattern] = self._can_follow(pattern)
        return self._known[pattern]


def weaker_schemas(schema: Any, trials: PatternTrials) -> Iterator[Any]:
    """Yield weaker and weaker schemas to replace `schema`: first without the keywords that no
    grammar can follow, then without the patterns that fail in `trials`, then without patterns and
    formats.

    Raises:
        ValueError: the schema is nested too deep.
    """
    yield _Weakening(schema, lambda _pattern: True, patterns_meet=True).schema(schema, 0)
    yield _Weakening(schema, trials.keep).schema(schema, 0)
    yield _Weakening(schema, lambda _pattern: False, formats=False).schema(schema, 0)


class _Weakening:
    """One way to weaken a schema."""

    def __init__(
        self,
        root: Any,
        keeps: Callable[[str], bool],
        *,
        formats: bool = True,
        patterns_meet: bool = False,
    ) -> None:
        """`keeps` returns whether a pattern stays. `patterns_meet`: whether several patterns for
        the names of one object stay; the library accepts them only if no name can match two.
        """
        self._root = root
        self._keeps = keeps
        self._formats = formats
        self._patterns_meet = patterns_meet

    def schema(self, part: Any, depth: int) -> Any:
        """Return what remains of one schema. Values that are no schema stay as they are: the
        library reports what is wrong with them.
        """
        if not isinstance(part, dict):
            return part
        if depth > MAX_NESTING:
            raise ValueError(f"the schema is nested more than {MAX_NESTING} deep; use $defs")
        weak = {
            key: self._value(key, value, depth + 1)
            for key, value in part.items()
            if self._stays(key, value)
        }
        others = part.get("patternProperties")
        if isinstance(others, dict) and "patternProperties" not in weak:
            # It would now restrict the properties whose names match a pattern.
            weak.pop("additionalProperties", None)
        members = weak.pop("oneOf", None)
        if members is not None:
            # A value may meet more than one of the weakened members.
            if "anyOf" not in weak:
                weak["anyOf"] = members
            elif isinstance(more := weak.get("allOf", []), list):
                weak["allOf"] = [*more, {"anyOf": members}]
        return weak

    def _stays(self, key: str, value: Any) -> bool:
        if key == "$ref":
            return not isinstance(value, str) or self._resolves(value)
        if key == "$schema":
            return not isinstance(value, str) or value.startswith(_OFFICIAL)
        if key == "pattern":
            return not isinstance(value, str) or self._keeps(value)
        if key == "format":
            return self._formats
        if key == "patternProperties" and isinstance(value, dict):
            return (self._patterns_meet or len(value) == 1) and all(map(self._keeps, value))
        return key not in NOT_FOLLOWED

    def _value(self, key: str, value: Any, depth: int) -> Any:
        if key in PLAIN_VALUES:
            return value
        if key in MAPS_OF_SCHEMAS and isinstance(value, dict):
            return {name: self.schema(part, depth) for name, part in value.items()}
        if isinstance(value, list) and (key in _LISTS or key == "items"):
            return [self.schema(part, depth) for part in value]
        return self.schema(value, depth) if key in _HOLDERS else value

    def _resolves(self, reference: str) -> bool:
        """Return whether a reference stays. It is left out if it leads to another document, to a
        part that is left out here, or only back to itself. The library refuses one that leads
        nowhere.
        """
        seen: set[str] = set()
        while reference not in seen:
            seen.add(reference)
            if not (reference == "#" or reference.startswith("#/")):
                return False
            if len(reference) > MAX_REFERENCE_CHARS:
                return True
            if any(step in _MOVED for step in reference.split("/")):
                return False
            target = follow_reference(reference, self._root)
            following = target.get("$ref") if isinstance(target, dict) else None
            if not isinstance(following, str):
                return True
            reference = following
        return False
