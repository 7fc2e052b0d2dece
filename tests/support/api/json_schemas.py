"""Random JSON schemas of the shapes that tools have in the wild: objects of described scalars,
enums, arrays, optional and nullable fields, references, unions, bounds, patterns and formats.
"""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]

_WORDS = [
    "query", "city", "unit", "limit", "start_date", "end-date", "userId", "tags", "filters",
    "path", "file.name", "价格", "options", "is_active", "$expand", "count", "lat", "lon", "a b",
    "description", "type", "id", "name", "format", "default", "required", "emoji🙂", 'qu"ote',
]  # fmt: skip
_PATTERNS = [
    "^[A-Z]{2,3}-[0-9]{1,4}$", "^[a-z0-9_]+$", r"^\d{3}-\d{4}$", "^(GET|POST|PUT)$",
    r"^#[0-9a-fA-F]{6}$", r"^v\d+\.\d+(\.\d+)?$", "[a-f]{2}", "^/[a-z]*$", r"^\+?[1-9]\d{1,5}$",
]  # fmt: skip
_FORMATS = ["date", "time", "date-time", "ipv4", "uuid", "int64", "password", "email"]


class SchemaMaker:
    """Makes schemas from a seeded source of chance."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._defs: dict[str, Schema] = {}

    def parameters(self) -> Schema:
        """Return the `parameters` of a tool: an object, its definitions beside it."""
        self._defs = {}
        schema = self._object(depth=0)
        if self._random.random() < 0.3:
            schema["$schema"] = "http://json-schema.org/draft-07/schema#"
        if self._defs:
            schema["$defs"] = self._defs
        return schema

    def _object(self, depth: int) -> Schema:
        random = self._random
        names = random.sample(_WORDS, random.randint(0 if depth else 1, 4 - depth))
        schema: Schema = {
            "type": "object",
            "properties": {name: self._any(depth + 1) for name in names},
        }
        if names and random.random() < 0.85:
            schema["required"] = random.sample(names, random.randint(1, len(names)))
        chance = random.random()
        if chance < 0.6:
            schema["additionalProperties"] = False
        elif chance < 0.7:
            schema["additionalProperties"] = self._scalar()
        return schema

    def _any(self, depth: int) -> Schema:
        random = self._random
        chance = random.random()
        if chance < 0.62 or depth >= 3:
            schema = self._scalar()
        elif chance < 0.74:
            schema = self._array(depth)
        elif chance < 0.84:
            schema = self._object(depth)
        elif chance < 0.92:
            schema = self._union(depth)
        else:
            schema = self._reference(depth)
        if "$ref" not in schema and random.random() < 0.4:
            schema["description"] = random.choice(["What it is.", "Use ISO 8601", "e.g. 'x'"])
        return schema

    def _scalar(self) -> Schema:
        random = self._random
        kind = random.choice(["string"] * 4 + ["integer"] * 2 + ["number", "boolean", "enum"] * 2)
        if kind == "string":
            return self._string()
        if kind == "integer":
            return self._integer()
        if kind == "number":
            schema: Schema = {"type": "number"}
            if random.random() < 0.5:
                schema |= {"minimum": random.randint(-9, 0), "maximum": random.choice([1, 2.5, 90])}
            return schema
        if kind == "boolean":
            return {"type": "boolean", "default": False}
        return self._enum()

    def _string(self) -> Schema:
        random = self._random
        schema: Schema = {"type": "string"}
        chance = random.random()
        if chance < 0.2:
            schema["pattern"] = random.choice(_PATTERNS)
        elif chance < 0.4:
            schema["format"] = random.choice(_FORMATS)
        elif chance < 0.6:
            schema |= {"minLength": random.randint(0, 3), "maxLength": random.randint(3, 12)}
        elif chance < 0.7:
            schema["type"] = ["string", "null"]
        return schema

    def _integer(self) -> Schema:
        random = self._random
        schema: Schema = {"type": "integer"}
        chance = random.random()
        if chance < 0.4:
            schema |= {"minimum": random.randint(-3, 1), "maximum": random.randint(2, 5000)}
        elif chance < 0.5:
            schema |= {"exclusiveMinimum": 0, "multipleOf": random.choice([1, 5, 10])}
        return schema

    def _enum(self) -> Schema:
        random = self._random
        values: list[Any] = random.sample(["asc", "desc", "°C", "a", "ab", "x y", 'q"', ""], 3)
        if random.random() < 0.2:
            return {"const": values[0]}
        if random.random() < 0.2:
            return {"enum": [*values, None, 3]}
        return {"type": "string", "enum": values}

    def _array(self, depth: int) -> Schema:
        random = self._random
        schema: Schema = {"type": "array", "items": self._any(depth + 1)}
        if random.random() < 0.6:
            schema |= {"minItems": random.randint(0, 2), "maxItems": random.randint(2, 4)}
        return schema

    def _union(self, depth: int) -> Schema:
        random = self._random
        if random.random() < 0.5:
            return {"anyOf": [self._scalar(), {"type": "null"}]}
        first, second = (self._object(depth + 1) for _ in range(2))
        for number, branch in enumerate([first, second]):
            branch["properties"] = {"kind": {"const": f"k{number}"}, **branch["properties"]}
            branch["required"] = ["kind", *branch.get("required", [])]
        return {random.choice(["anyOf", "oneOf"]): [first, second]}

    def _reference(self, depth: int) -> Schema:
        name = f"Def{self._random.randint(0, 2)}"
        if name not in self._defs:
            self._defs[name] = {}  # held, so that it is not made twice
            self._defs[name] = self._any(max(depth + 1, 2))
            if "$ref" in self._defs[name]:
                self._defs[name] = self._scalar()
        return {"$ref": f"#/$defs/{name}"}
