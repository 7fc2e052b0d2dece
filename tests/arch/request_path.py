"""Counts what one chat request passes: `python -m tests.arch.request_path`.

A prefill, a decode and a kvstore worker run as threads of this process, with a small model of
random weights, behind the real API. A file counts when a function of it runs while the request is
served that does not run while the cluster is idle. A form counts when it is handed to such a
function and carries the request's words or tokens in a field of its own (`CARRIES`), or holds what
does (`HOLDS`).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx

from mooncake.api.app import create_app
from mooncake.api.model import load_served_model
from mooncake.launch.cluster.colocated import ColocatedWorkers
from mooncake.launch.cluster.gateways.gateway_process import GatewayProcess, api_config
from mooncake.launch.config.plan import make_plan
from mooncake.launch.config.settings import ServeConfig
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.arch.sizes import ROOT, SOURCE_ROOTS

CARRIES = {
    "content", "delta", "messages", "output_tokens", "prompt", "prompt_tokens", "text", "token",
    "tokens",
}  # fmt: skip
"""Fields for the words or tokens of a request or its answer."""
HOLDS = {"event", "output", "request", "sequence", "task"}
"""Fields for something that carries them."""
WORDS = "Say one word and then nothing more, whatever else was said before this line. " * 4
"""Long enough for a full block, which goes into the pool."""
IDLE_S = 11.0
"""Whatever comes regularly comes within it; the look at replicas is the rarest, every 10 s."""


class Trace:
    """What runs, and what is handed around, while `phase` is `request`, save what is `idle`'s."""

    def __init__(self) -> None:
        self.phase = ""
        self._idle: set[CodeType] = set()
        self.files: dict[str, None] = {}
        """In the order in which they first ran."""
        self.forms: dict[str, str] = {}
        """Name of a class -> the field by which it counts."""
        self._roots = tuple(str(ROOT / root) for root in SOURCE_ROOTS)

    def install(self) -> None:
        """Look at every call of this thread and of those that start from now on."""
        sys.setprofile(self._called)
        threading.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if not self.phase or event != "call" or not code.co_filename.startswith(self._roots):
            return
        if self.phase == "idle":
            self._idle.add(code)
        if code in self._idle:
            return
        self.files.setdefault(Path(code.co_filename).relative_to(ROOT).as_posix())
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            self._look_at(frame.f_locals.get(name))

    def _look_at(self, value: object) -> None:
        if isinstance(value, list | tuple):
            value = value[0] if value else None
        kind = type(value)
        if kind.__module__.startswith("mooncake") and kind.__qualname__ not in self.forms:
            field = next(iter(sorted(_fields(value) & (CARRIES | HOLDS))), None)
            if field is not None:
                self.forms[kind.__qualname__] = field


def _fields(value: Any) -> set[str]:
    kind = type(value)
    named = getattr(kind, "__struct_fields__", None) or getattr(kind, "__slots__", None) or ()
    if dataclasses.is_dataclass(value):
        named = [field.name for field in dataclasses.fields(value)]
    return {*named, *getattr(value, "__dict__", ())}


async def trace_chat(model: Path, trace: Trace) -> None:
    """Serve `model` from 1P+1D+1K in this process, and look at one streamed chat request."""
    config = ServeConfig(
        model=str(model), prefill=1, decode=1, kvstore=1, kvstore_dram_bytes=1 << 24,
        num_gpu_blocks_override=64, self_profile=False, max_model_len=1024,
    )  # fmt: skip
    plan = make_plan(config, 1)
    workers = ColocatedWorkers(config, plan)
    gateway = GatewayProcess(plan, workers.gateway_channel, config.names[0])
    served = load_served_model(model, names=config.names, max_model_len=plan.model.max_model_len)
    app = create_app(gateway.backend, served, api_config(config))
    gateway.backend.start()
    try:
        rows = await asyncio.to_thread(workers.start, gateway, lambda *_: None)
        while not gateway.knows([row.worker_id for row in rows]):
            await asyncio.sleep(0.01)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {
                "model": config.names[0], "messages": [{"role": "user", "content": WORDS}],
                "max_tokens": 8, "stream": True, "ignore_eos": True,
            }  # fmt: skip
            trace.phase = "idle"
            await asyncio.sleep(IDLE_S)
            trace.phase = "request"
            reply = await client.post("/v1/chat/completions", json=body, timeout=120)
            trace.phase = ""
            if reply.status_code != 200 or "[DONE]" not in reply.text:
                raise RuntimeError(f"the request was not served: {reply.text}")
    finally:
        gateway.backend.stop()
        await asyncio.to_thread(workers.stop)
        gateway.channel.close()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.arch.request_path", description=__doc__)
    what = "name the files, in the order in which they first ran, and the forms"
    parser.add_argument("--list", action="store_true", help=what)
    wanted = parser.parse_args(argv)
    trace = Trace()
    trace.install()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "k2-nano"
        init_checkpoint("k2-nano", 0, model)
        asyncio.run(trace_chat(model, trace))
    lines = {name: (ROOT / name).read_text().count("\n") for name in trace.files}
    if wanted.list:
        for name, count in lines.items():
            print(f"{count:5} {name}")
        for form, field in sorted(trace.forms.items()):
            print(f"form  {form} ({field})")
    print(f"{len(lines)} files with {sum(lines.values()):,} lines, {len(trace.forms)} forms")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
