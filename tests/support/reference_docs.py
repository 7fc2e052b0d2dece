"""The pages of `docs/reference/`, made of the code they describe.

`python -m tests.support.reference_docs --write` (or `make docs`) writes them anew; a test compares.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
from prometheus_client import CollectorRegistry

from mooncake.api.api_server import LANE_PLACES
from mooncake.api.app import create_app
from mooncake.api.batches.window import MAX_LINES
from mooncake.api.bounds import PRICES
from mooncake.api.config import ApiConfig
from mooncake.api.generation.sampling import MAX_COUNTED_CONTEXTS
from mooncake.api.http.limits import LOGPROB_BYTES, SLO_TBT, SLO_TTFT
from mooncake.api.http.repeats import HEADER, MAX_READERS
from mooncake.api.http.server import MAX_SHAKING
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.completion import CompletionRequest
from mooncake.api.schema.messages import MessagesRequest
from mooncake.api.schema.responses import ResponsesRequest
from mooncake.base import messages, pool_messages
from mooncake.base.pool_messages import AnyMessage
from mooncake.cli.command import Command, Flag
from mooncake.cli.registry import EXIT_CODES, describe
from mooncake.kvstore.node.blocks import COUNTERS
from mooncake.launch.pool_node import metrics as pool_metrics
from mooncake.launch.worker import metrics as worker_metrics
from mooncake.telemetry.series import (
    BuildInfo,
    CacheInfo,
    RequestSeries,
    TenantSeries,
    WorkerSeries,
    set_infos,
)
from tests.support.api.server import ScriptedBackend, says, tiny_model

TOP = Path(__file__).resolve().parents[2]
PAGES = TOP / "docs" / "reference"
CHART = TOP / "charts" / "mooncake"
GENERATED = "<!-- Made by `make docs` from the code; do not edit. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def one_line(text: str | None) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join((text or "").split("\n\n")[0].split())


# ---------------------------------------------------------------- commands


def flags() -> list[str]:
    """Return the page of commands, flags and configuration keys."""
    lines = [
        "# Commands, flags and configuration keys", "",
        "A command that takes `--config FILE` reads the same settings from YAML: the key is the "
        "name of the flag without its dashes. A flag on the command line wins over the file, the "
        "file over the environment variable, and that over the default. An unknown key or a wrong "
        "value is an error that names it. A switch has a `--no-` form where a file may turn it on.",
        "",
        *table(["exit code", "meaning"], ([f"{c}", text] for c, text in EXIT_CODES.items())),
    ]  # fmt: skip
    for command in describe():
        lines += ["", *_command(command)]
    return lines


def _command(command: Command) -> list[str]:
    lines = [
        f"## mooncake {command.words}",
        "",
        f"{command.summary[0].upper()}{command.summary[1:]}.",
    ]
    if command.takes_file:
        lines[-1] += " Takes `--config FILE`."
    groups: dict[str, list[Flag]] = {}
    for flag in command.flags:
        groups.setdefault(flag.option.group, []).append(flag)
    for group, found in groups.items():
        lines += [
            "", *([f"### {command.words}: {group}", ""] if len(groups) > 1 else []),
            *table(["flag", "default", "meaning"], map(_flag, found)),
        ]  # fmt: skip
    return lines


def _flag(flag: Flag) -> list[str]:
    option = flag.option
    shown = ", ".join(code(f"{name} {option.metavar}".strip()) for name in flag.names)
    notes = [option.text]
    if option.choices:
        notes.append(f"one of {', '.join(map(code, option.choices))}")
    if option.variables:
        notes.append(f"environment: {' or '.join(map(code, option.variables))}")
    if option.required:
        notes.append("needed")
    return [shown, code(flag.default), "; ".join(notes)]


# ---------------------------------------------------------------- metrics


def metrics() -> list[str]:
    """Return the page of Prometheus series."""
    registry = CollectorRegistry()
    build = BuildInfo(version="", revision="", role="", layout="")
    cache = CacheInfo(block_size="", cache_dtype="", enable_prefix_caching="", num_gpu_blocks="")
    set_infos(registry, "MODEL", build, cache)
    RequestSeries(registry, "MODEL")
    TenantSeries(registry, "MODEL")
    WorkerSeries(registry, "MODEL")
    lines = [
        "# Metrics", "",
        "Names of a gateway follow vLLM's, with the prefix `mooncake:`. Histograms are series of "
        "their own with `_bucket`, `_sum` and `_count` at the end.", "",
        "## A gateway: `GET /metrics` of the API", "",
        *table(["series", "kind", "labels", "meaning"], _series(registry._collector_to_names)),
        "", "## A worker: `GET /metrics` of `--health-port`", "",
        "Also of a pool node's `--admin-port`. Besides these there are the `process_` series that "
        "Prometheus' own client has for memory, CPU time and descriptors.", "",
    ]  # fmt: skip
    nodes = {name: text for name, (text, _) in pool_metrics.GAUGES.items()}
    tenants = {name: text for name, (text, _) in pool_metrics.TENANT_GAUGES.items()}
    links = {name: text for name, (text, _) in worker_metrics.LINK_COUNTS.items()}
    slices = {"slice_seconds": "time from posting a slice to its arrival"}
    health, stuck = worker_metrics.HEALTH.items()
    engines = {name: text for name, (text, _) in worker_metrics.GAUGES.items()}
    counts = {worker_metrics.COUNTS: "counters that an engine's worker keeps"}
    whose = worker_metrics.LABELS
    rows = [
        *_of_node("", "gauge", worker_metrics.BUILD_LABELS, {"build_info": worker_metrics.BUILD}),
        *_of_node("", "gauge", [*whose, "probe"], dict([health])),
        *_of_node("", "gauge", whose, dict([stuck])),
        *_of_node("worker_", "gauge", whose, engines),
        *_of_node("worker_", "counter", [*whose, "name"], counts),
        *_of_node("pool_", "gauge", ["worker"], nodes),
        *_of_node("pool_", "gauge", ["worker", "tenant", "tier"], tenants),
        *_of_node("pool_", "counter", ["worker"], COUNTERS),
        *_of_node("transfer_", "counter", worker_metrics.LINK_LABELS, links),
        *_of_node("transfer_", "histogram", worker_metrics.LATENCY_LABELS, slices),
    ]
    return [*lines, *table(["series", "kind", "labels", "meaning"], rows)]


def _series(collectors: Iterable[Any]) -> Iterator[list[str]]:
    for collector in collectors:
        for family in collector.collect():
            name = family.name + "_total" * (family.type == "counter")
            yield [code(name), family.type, ", ".join(collector._labelnames), family.documentation]


def _of_node(
    prefix: str, kind: str, labels: Sequence[str], named: Mapping[str, str]
) -> list[list[str]]:
    end = "_total" * (kind == "counter")
    return [
        [code(f"mooncake_{prefix}{name}{end}"), kind, ", ".join(labels), text]
        for name, text in named.items()
    ]


# ---------------------------------------------------------------- messages


def wire() -> list[str]:
    """Return the page of the messages that workers and gateways exchange."""
    lines = [
        "# Messages", "",
        "What gateways, workers and pool clients send each other, in MessagePack over ZeroMQ. A "
        "message of an older `epoch` (a process's life) or `attempt` (a placement) is ignored. "
        f"Protocol version {messages.PROTOCOL_VERSION}.",
    ]  # fmt: skip
    for module in (messages, pool_messages):
        lines += ["", f"## `{module.__name__}`"]
        for kind in get_args(AnyMessage):
            if kind.__module__ == module.__name__:
                lines += ["", *_message(kind)]
    return lines


def _message(kind: type[msgspec.Struct]) -> list[str]:
    lines = [f"### {kind.__name__}", "", one_line(inspect.getdoc(kind)), ""]
    rows = []
    annotations: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        annotations |= inspect.get_annotations(each)
    for field in msgspec.structs.fields(kind):
        written = annotations[field.name]
        rows.append(
            [code(field.encode_name), code(str(written)), "" if field.required else "optional"]
        )
    tag = f"Tag: `{kind.__struct_config__.tag}`"
    return [*lines, tag, *(["", *table(["field", "type", ""], rows)] if rows else [])]


# ---------------------------------------------------------------- HTTP


def http() -> list[str]:
    """Return the page of HTTP routes and of the fields of their bodies."""
    document = create_app(ScriptedBackend(says("x")), tiny_model(), ApiConfig()).openapi()
    routes, bodies = [], {}
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            content = route.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            body = schema.get("$ref", "").rpartition("/")[2]
            if body:
                bodies[body] = document["components"]["schemas"][body]
            linked = f"[{body}](#{body.lower()})" if body else ""
            text = one_line(route.get("description"))
            routes.append([code(f"{method.upper()} {path}"), linked, text])
    lines = [
        "# HTTP routes", "",
        "Of the API server. The whole OpenAPI document is at `/openapi.json` of a running server. "
        "Routes under `/v1`, `/tokenize`, `/detokenize` and `/tokenizer_info` need a key where "
        "keys are configured. `/` is the web page. Every POST route of it takes the header "
        f"`{HEADER}` ([retries](../retries.md)); those that generate also take `{SLO_TTFT}` and "
        f"`{SLO_TBT}` ([limits of a request](../serving.md#limits-of-a-request)).", "",
        *table(["route", "body", "meaning"], routes),
        "", "Of a pool node's `--admin-port`:", "",
        *table(["route", "meaning"], [
            [code("GET /health"), "200 while it serves; 503 while it has not joined, or drains"],
            [code("GET /metrics"), "[series](metrics.md) in Prometheus' text format"],
            [code("GET /v1/pool/stats"), "its figures; needs an admin token or a signature"],
            [code("POST /v1/pool/drain"), "take nothing more and hand blocks on; needs one too"],
        ]),
    ]  # fmt: skip
    for name, schema in bodies.items():
        needed = set(schema.get("required", ()))
        rows = [
            [code(field), code(_kind(about)), "needed" if field in needed else _default(about)]
            for field, about in schema["properties"].items()
        ]
        lines += ["", f"## {name}", "", *table(["field", "type", "default"], rows)]
    return [*lines, *_refused_fields()]


def _refused_fields() -> list[str]:
    """Return the sections of fields that users of other servers know and this one cannot honour."""
    refused: dict[tuple[str, str, str], list[str]] = {}
    quiet: dict[str, list[str]] = {}
    for body in (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest):
        honoured = body.model_json_schema()["properties"]
        for name, (neutral, advice) in body.unsupported.items():
            if name in honoured:
                continue
            allowed = ", ".join(code(json.dumps(value)) for value in neutral)
            refused.setdefault((name, allowed, advice), []).append(body.__name__)
        for name in body.quiet:
            quiet.setdefault(name, []).append(body.__name__)
    rows = [
        [code(name), ", ".join(bodies), allowed, advice]
        for (name, allowed, advice), bodies in sorted(refused.items())
    ]
    return [
        "", "## Fields that are refused", "",
        "A value other than null and those in the third column gets 400, with the advice as its "
        "message. So does content that is no text (images, audio, files), and what would change "
        "tokens in `structured_outputs`: `structural_tag`, `whitespace_pattern`, "
        "`disable_any_whitespace`, `disable_additional_properties`. A field that is in no table "
        "of this page is ignored; if it is a field of the whole body, the log names it.", "",
        *table(["field", "of", "allowed", "advice"], rows),
        "", "## Fields without effect", "",
        "They are accepted, and change no token.", "",
        *table(["field", "of"], [[code(n), ", ".join(of)] for n, of in sorted(quiet.items())]),
    ]  # fmt: skip


def _kind(about: Mapping[str, Any]) -> str:
    """Return the type of a JSON schema in a few words."""
    if "$ref" in about:
        return str(about["$ref"].rpartition("/")[2])
    if "const" in about:
        return repr(about["const"])
    if "enum" in about:
        return " or ".join(map(repr, about["enum"]))
    for key in ("anyOf", "oneOf"):
        if key in about:
            return " or ".join(dict.fromkeys(_kind(each) for each in about[key]))
    if about.get("type") == "array":
        return f"list of {_kind(about.get('items', {}))}"
    return str(about.get("type", "anything"))


def _default(about: Mapping[str, Any]) -> str:
    value = about.get("default")
    return code(str(value)) if value is not None else ""


# ---------------------------------------------------------------- the chart


def chart() -> list[str]:
    """Return the chart's page, with its values: each with the comment that stands before it."""
    lines = [
        "# The chart of Mooncake", "", "    helm install NAME charts/mooncake -f VALUES.yaml", "",
        "The [operator's guide](../../docs/kubernetes.md) has the steps, and [ci](ci) has files "
        "of values.", "", "## Values", "",
    ]  # fmt: skip
    rows: list[list[str]] = []
    said: list[str] = []
    path: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        text = line.strip()
        if text.startswith("# ") and not text.startswith(("#  ", "# -")):
            said.append(text.removeprefix("# "))
        elif found := re.fullmatch(r"( *)([A-Za-z]\w*):(.*)", line):
            path[len(found[1]) // 2 :] = [found[2]]
            default = found[3].strip()
            if default or said:
                rows.append([code(".".join(path)), code(default), " ".join(said)])
            said = []
        elif not text:
            said = []
    return [*lines, *table(["value", "default", "what it is"], rows)]


def prices() -> list[str]:
    """Return what each field of a request may ask for, and what it pays."""
    lines = [
        "# Bounds and prices of request fields",
        "",
        "A request pays one permit, the tokens of its prompt and those of its answer. What these "
        "fields may ask for is bounded; more gets 400 with an error that names the field and the "
        "limit. [HTTP](http.md) has the range of each number.",
        "",
    ]
    rows = [
        [
            code(field),
            "; ".join(f"{bound.limit:,} {bound.unit}" for bound in price.bounds),
            price.pays,
        ]
        for field, price in PRICES.items()
    ]
    lines += table(["field", "bound", "what it pays besides"], rows)
    config = ApiConfig()
    doors = [
        ["bytes of one body", f"{config.max_body_bytes:,}", "413"],
        ["cost of the values in one body", f"{config.max_body_cost:,}", "413"],
        [
            "bytes of the bodies of running requests, and of the replies of `/tokenize` and "
            "`/detokenize` until they are taken",
            f"{config.max_inflight_body_bytes:,}", "429",
        ],
        [
            "bytes of the log-probabilities of running requests, each with its longest answer "
            f"({LOGPROB_BYTES} for one)",
            f"{config.max_inflight_logprob_bytes:,}",
            "429",
        ],
        ["requests with a body at a time", f"{config.max_concurrent:,}", "429"],
        [
            "bytes of recorded answers to requests with an `Idempotency-Key`",
            f"{config.max_kept_answer_bytes:,}",
            "not kept; 409 to repeats until it has ended",
        ],
        ["connections that read one such answer", f"{MAX_READERS:,}", "409"],
        ["texts, and schemas, that wait in a lane", f"{LANE_PLACES:,}", "503"],
        [
            "tokens of a text for `/tokenize` or `count_tokens`",
            f"{MAX_COUNTED_CONTEXTS} contexts of the model", "400",
        ],
        ["token ids for `/detokenize`", "1 context of the model", "400"],
        [
            "open connections, or fewer where the process may open too few files",
            f"{config.max_connections:,}",
            "the oldest that has proven no key is closed; if all have, the oldest for which "
            "nothing is computed",
        ],
        ["TLS handshakes at a time", f"{MAX_SHAKING:,}", "the oldest ends"],
        ["bytes of one uploaded file", f"{config.max_batch_file_bytes:,}", "413"],
        ["bytes of the files of a tenant", f"{config.max_tenant_batch_bytes:,}", "403"],
        ["batches of a tenant that have not ended", f"{config.max_tenant_batches:,}", "429"],
        ["lines of a batch", f"{config.max_batch_lines:,}", "the batch fails"],
        [
            "lines of batches that a gateway asks at a time", f"{MAX_LINES:,}",
            "they wait; a tenant has half of what others leave",
        ],
    ]  # fmt: skip
    lines += ["", "These hold for whole requests; one key has at most half of what the others "
              "leave of bodies, recorded answers, requests and lanes. A key of which nothing waits "
              "in a lane always gets a place there.", ""]  # fmt: skip
    return [*lines, *table(["what", "bound", "above it"], doors)]


PAGES_BY_NAME: dict[str, Callable[[], list[str]]] = {
    "flags.md": flags, "metrics.md": metrics, "messages.md": wire, "http.md": http,
    "prices.md": prices,
    "../../charts/mooncake/README.md": chart,
}  # fmt: skip


def page(name: str) -> str:
    """Return the text of one page."""
    return "\n".join([GENERATED, "", *PAGES_BY_NAME[name]()]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/reference")
    write = parser.parse_args().write
    for name in PAGES_BY_NAME:
        if write:
            (PAGES / name).write_text(page(name))
        else:
            print(page(name))


if __name__ == "__main__":
    main()
