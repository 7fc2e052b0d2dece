"""What travels between processes, as text: one line a field. `tests/arch/wire_messages.txt` records
it, so that a change with which the release before could not work together is noticed.

`python -m tests.support.wire_schema --write` records it anew; it refuses such a change unless
`OLDEST_PROTOCOL_VERSION` has changed, too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from msgspec import inspect

from mooncake.base.messages import OLDEST_PROTOCOL_VERSION
from mooncake.base.pool_messages import AnyMessage
from mooncake.base.request import PromptLogprobs
from mooncake.launch.cluster.facts import ClusterFacts

RECORD = Path(__file__).parents[1] / "arch" / "wire_messages.txt"
Schema = dict[str, list[str]]
"""Name of a struct or an enumeration -> its fields, or its values, in their order."""


def present() -> Schema:
    """Return what the code sends, with the oldest version that understands it."""
    version = {"protocol": [str(OLDEST_PROTOCOL_VERSION)]}
    return version | schema_of(AnyMessage, ClusterFacts)  # in an update the head is the older one


def schema_of(*kinds: Any) -> Schema:
    """Return the fields of structs, and of all that they are made of."""
    found: Schema = {}

    def name_of(kind: inspect.Type) -> str:
        match kind:
            case inspect.StructType() | inspect.DataclassType():
                _add(kind)
                return kind.cls.__name__
            case inspect.EnumType():
                found[kind.cls.__name__] = sorted(str(member.value) for member in kind.cls)
                return kind.cls.__name__
            case inspect.UnionType():
                return " | ".join(sorted(map(name_of, kind.types)))
            case inspect.ListType() | inspect.FrozenSetType():  # alike on the wire
                return f"list[{name_of(kind.item_type)}]"
            case inspect.VarTupleType():
                return f"tuple[{name_of(kind.item_type)}, ...]"
            case inspect.TupleType():
                return f"tuple[{', '.join(map(name_of, kind.item_types))}]"
            case inspect.DictType():
                return f"dict[{name_of(kind.key_type)}, {name_of(kind.value_type)}]"
            case inspect.RawType():  # RequestOutput.prompt_logprobs, read later
                return name_of(inspect.type_info(PromptLogprobs | None))
            case inspect.LiteralType():
                return f"one of {sorted(map(str, kind.values))}"
            case _:
                return type(kind).__name__.removesuffix("Type").lower()

    def _add(kind: inspect.StructType | inspect.DataclassType) -> None:
        if kind.cls.__name__ in found:
            return
        lines = found[kind.cls.__name__] = []
        if isinstance(kind, inspect.StructType):
            lines += [f"tag {kind.tag}"] if kind.tag is not None else []
            lines += ["in order"] if kind.array_like else []
        for field in kind.fields:
            needed = " needed" if field.required else ""
            lines.append(f"{field.encode_name}: {name_of(field.type)}{needed}")

    for each in kinds:
        name_of(inspect.type_info(each))
    return found


def breaks(old: Schema, new: Schema) -> list[str]:
    """Return what keeps processes of `old` and `new` from working together, of one version: what is
    gone or other than it was, and new fields without a default. Fields sent in order stay in it.
    """
    found = []
    for name, fields in old.items():
        later = new.get(name, [])
        found += [f"{name}: {field} is gone" for field in fields if field not in later]
        if "in order" in fields and later[: len(fields)] != fields:
            found.append(f"{name}: new fields belong behind the others")
        found += [
            f"{name}: {field} has no default"
            for field in later
            if field not in fields and field.endswith(" needed")
        ]
    return found


def text_of(schema: Schema) -> str:
    return "".join(
        f"{name}\n" + "".join(f"    {field}\n" for field in fields)
        for name, fields in sorted(schema.items())
    )


def recorded() -> Schema:
    schema: Schema = {}
    name = ""
    for line in RECORD.read_text().splitlines():
        if line.startswith(" "):
            schema[name].append(line.strip())
        else:
            schema[name := line] = []
    return schema


def main() -> int:
    """Record what there is; return 1 when it would break updates."""
    new = present()
    old = recorded() if RECORD.exists() else {}
    if old.get("protocol") == new["protocol"] and (problems := breaks(old, new)):
        cure = "give what is new a default, or raise OLDEST_PROTOCOL_VERSION"
        print(*problems, cure, sep="\n")
        return 1
    if "--write" in sys.argv:
        RECORD.write_text(text_of(new))
    return 0


if __name__ == "__main__":
    sys.exit(main())
