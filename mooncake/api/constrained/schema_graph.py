"""A JSON schema as a graph: its depth with references followed, and whether references resolve.
Pure.

The library that compiles schemas follows definitions by recursion, and a stack overflow ends the
process. So a schema that is too deep is refused before the library sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from mooncake.base import InvalidRequest

MAX_NESTING = 100
"""The deepest nesting of the schema as it is written; the library takes 128."""
MAX_DEPTH = 800
"""The most objects and lists on a path from the root, with references followed. The library needs a
stack of 8 MiB for 2,400."""
MAX_PARTS = 10_000
"""The most objects and lists in the schemas of one grammar, and values in those that `const` and
`enum` give. Compiling so many takes half a second, in which the other sequences of a step wait.
"""

MAX_PROPERTIES = 1_000
"""The most properties that one object may declare, require or be given, in all schemas that hold
for it together (`allOf`). The time to compile them grows with their square: 9,000 take 2.6 s of a
CPU, 1,000 a fiftieth of that.
"""
MAX_OPTIONAL = 450
"""The most of these properties that an object may lack. Any of them may come next, and the library
gives up a grammar of which more than 2,000 parts may, four for each, in the middle of an answer.
"""
MAX_NAME_PATTERNS = 100
"""The most patterns for names of properties (`patternProperties`) of one object, counted alike. 200
take a second of a CPU to compile, 300 take six.
"""
MAX_PATTERNS = 3
"""The most patterns and formats that one text must match together (`allOf`). Each further one makes
a mask about ten times as expensive: with six it takes seconds.
"""

MAX_REFERENCE_CHARS = 2_048
"""A longer reference leads nowhere. It is not split into its steps, which may be millions."""

MAPS_OF_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
"""Keywords whose value maps names to schemas."""
PLAIN_VALUES = frozenset({"const", "default", "enum", "examples", "required"})
"""Keywords whose value is never a schema, whatever it looks like."""

_Part = dict[str, Any] | list[Any]


def check_schema(schema: dict[str, Any], param: str) -> int:
    """Check that `schema` can be read in bounded depth; return how many objects and lists it has.

    Raises:
        InvalidRequest: the schema is too large or too deep, intersects too many patterns, or a
            reference leads nowhere or only to itself; `param` names the field.
    """
    graph = _Graph(schema, param)
    graph.check_loops()
    if graph.depth() > MAX_DEPTH:
        raise InvalidRequest(
            f"{param}: the schema is too deep: following its references, more than {MAX_DEPTH} "
            "objects lie within each other",
            param=param,
        )
    graph.check_intersections()
    return graph.num_parts


_Count = Callable[[dict[str, Any]], int]
_TOO_MANY = "more than {} {} (allOf counts together)"
_PROPERTIES = "properties are declared for one object"
_OPTIONAL = "properties of one object may be missing"


def _num_patterns(part: dict[str, Any]) -> int:
    return sum(isinstance(part.get(key), str) for key in ("pattern", "format"))


def _named_by(part: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Return the properties that a schema declares, and those that it requires."""
    declared, required = part.get("properties"), part.get("required")
    return (
        set(declared) if isinstance(declared, dict) else set(),
        {name for name in required if isinstance(name, str)}
        if isinstance(required, list)
        else set(),
    )


def _num_properties(part: dict[str, Any]) -> int:
    declared, required = _named_by(part)
    return len(declared | required)


def _num_optional(part: dict[str, Any]) -> int:
    declared, required = _named_by(part)
    return len(declared - required)


def _num_name_patterns(part: dict[str, Any]) -> int:
    patterns = part.get("patternProperties")
    return len(patterns) if isinstance(patterns, dict) else 0


class _Graph:
    """The objects and lists of a schema by identity, with their children and reference targets."""

    def __init__(self, schema: dict[str, Any], param: str) -> None:
        self._root = schema
        self._param = param
        self._parts: dict[int, _Part] = {id(schema): schema}
        self._children: dict[int, list[int]] = {}
        self._targets: dict[int, int] = {}
        self._num_values = 0
        """The number of values in the objects and lists of `const` and `enum`."""
        self._walk()
        self._resolve()

    @property
    def num_parts(self) -> int:
        return len(self._parts) + self._num_values

    def _refusal(self, problem: str) -> InvalidRequest:
        return InvalidRequest(f"{self._param}: {problem}", param=self._param)

    def _walk(self) -> None:
        """Find all parts, level by level."""
        level: list[tuple[_Part, bool]] = [(self._root, False)]
        for _ in range(MAX_NESTING):
            below: list[tuple[_Part, bool]] = []
            for part, is_map in level:
                inner = list(_inner(part, is_map))
                self._children[id(part)] = [id(each) for each, _ in inner]
                self._parts.update((id(each), each) for each, _ in inner)
                below += inner
                if isinstance(part, dict) and not is_map:
                    self._num_values += self._given(part)
            if self.num_parts > MAX_PARTS:
                raise self._refusal(f"the schema has more than {MAX_PARTS} objects and lists")
            if not below:
                return
            level = below
        raise self._refusal(f"the schema is nested more than {MAX_NESTING} deep; use $defs")

    def _given(self, part: dict[str, Any]) -> int:
        """Return how many values lie in the objects and lists that a schema gives as they are."""
        enum = part.get("enum")
        rest: list[Any] = [part.get("const"), *(enum if isinstance(enum, list) else ())]
        count = 0
        while rest:
            value = rest.pop()
            if isinstance(value, dict):
                if len(value) > MAX_PROPERTIES:
                    raise self._refusal(_TOO_MANY.format(MAX_PROPERTIES, _PROPERTIES))
                value = list(value.values())
            if isinstance(value, list):
                count += len(value)
                rest += value
        return count

    def _resolve(self) -> None:
        for which, part in self._parts.items():
            reference = part.get("$ref") if isinstance(part, dict) else None
            if isinstance(reference, str):
                target = id(follow_reference(reference, self._root))
                if target not in self._parts:
                    raise self._refusal(
                        f"there is no {reference[:100]!r} in the schema; references look like "
                        "'#/$defs/NAME'"
                    )
                self._targets[which] = target

    def check_loops(self) -> None:
        """Refuse references that only lead back to themselves: no JSON could be valid."""
        known: set[int] = set()
        for first in self._targets:
            way: dict[int, None] = {}
            here: int | None = first
            while here is not None and here not in known:
                if here in way:
                    part = self._parts[here]
                    assert isinstance(part, dict)
                    raise self._refusal(f"{part['$ref'][:100]!r} refers to itself only")
                way[here] = None
                here = self._targets.get(here)
            known.update(way)

    def check_intersections(self) -> None:
        """Refuse texts that must match too many patterns at once, and objects that may have too
        many properties. Check the depth before.
        """
        for own, most, what in (
            (_num_patterns, MAX_PATTERNS, "patterns and formats hold for one text"),
            (_num_properties, MAX_PROPERTIES, _PROPERTIES),
            (_num_optional, MAX_OPTIONAL, _OPTIONAL),
            (_num_name_patterns, MAX_NAME_PATTERNS, "patternProperties hold for one object"),
        ):
            known: dict[int, int] = {}
            if any(self._together(which, own, known) > most for which in reversed(self._parts)):
                raise self._refusal(_TOO_MANY.format(most, what))

    def _together(self, which: int, own: _Count, known: dict[int, int]) -> int:
        """Return the most of what `own` counts that holds for one value valid against this part."""
        part = self._parts.get(which)  # None: `true` and `false` are schemas too
        if which not in known and isinstance(part, dict):
            known[which] = 0  # what a loop of references comes back to counts once
            count = own(part)
            if (target := self._targets.get(which)) is not None:
                count += self._together(target, own, known)
            for key, combine in (("allOf", sum), ("anyOf", max), ("oneOf", max)):
                members = part.get(key)
                if isinstance(members, list) and members:
                    count += combine(self._together(id(each), own, known) for each in members)
            known[which] = count
        return known.get(which, 0)

    def _below(self, which: int) -> list[int]:
        target = self._targets.get(which)
        children = self._children[which]
        return children if target is None else [*children, target]

    def depth(self) -> int:
        """Return a bound on the number of parts on any path from the root that visits none twice.

        Each part of a strongly connected component counts once. It uses Tarjan's algorithm without
        recursion, which finds the innermost components first.
        """
        order: dict[int, int] = {}
        low: dict[int, int] = {}
        depth: dict[int, int] = {}
        unfinished: list[int] = []

        def enter(which: int) -> tuple[int, Iterator[int]]:
            order[which] = low[which] = len(order)
            unfinished.append(which)
            return which, iter(self._below(which))

        root = id(self._root)
        way = [enter(root)]
        while way:
            which, rest = way[-1]
            child = next(rest, None)
            if child is None:
                way.pop()
                if way:
                    above = way[-1][0]
                    low[above] = min(low[above], low[which])
                if low[which] == order[which]:
                    members = [unfinished.pop()]
                    while members[-1] != which:
                        members.append(unfinished.pop())
                    under = (depth.get(each, 0) for one in members for each in self._below(one))
                    depth |= dict.fromkeys(members, len(members) + max(under, default=0))
            elif child not in order:
                way.append(enter(child))
            elif child not in depth:
                low[which] = min(low[which], order[child])
        return depth[root]


def _inner(part: _Part, is_map: bool) -> Iterator[tuple[_Part, bool]]:
    """Yield the objects and lists in `part`, each with whether it maps names to schemas."""
    keywords = isinstance(part, dict) and not is_map
    items = part.items() if isinstance(part, dict) else enumerate(part)
    for key, value in items:
        if isinstance(value, dict | list) and not (keywords and key in PLAIN_VALUES):
            yield value, keywords and key in MAPS_OF_SCHEMAS


def follow_reference(reference: str, root: dict[str, Any]) -> Any:
    """Return the target of a local reference (a JSON pointer); None if it has none."""
    if reference == "#":
        return root
    if not reference.startswith("#/") or len(reference) > MAX_REFERENCE_CHARS:
        return None
    found: Any = root
    for step in reference[2:].split("/"):
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and name.isdecimal() and len(name) < 10:
            found = found[int(name)] if int(name) < len(found) else None
        else:
            return None
    return found
