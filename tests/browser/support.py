"""Helpers of the page's tests: a page that is watched, a scripted API server in a thread of its
own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from playwright.sync_api import ConsoleMessage, Locator, Page, Request, expect

from mooncake.api.app import create_app
from mooncake.api.config import ApiConfig
from mooncake.api.http.server import serve
from mooncake.base import Role, WorkerLoad
from mooncake.scheduler.gateway.status import ClusterStatus, LoadStatus, PoolStatus, WorkerStatus
from mooncake.telemetry.metrics import Recent
from mooncake.telemetry.receipts import Receipts
from tests.support.api.server import Script, ScriptedBackend, tiny_model, tiny_tokenizer
from tests.support.waiting import LONG_S

WAIT_MS = 1000 * LONG_S
expect.set_options(timeout=WAIT_MS)


class Visit:
    """One page under watch: what its console says and what it asks for."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.expected_errors: tuple[str, ...] = ()
        """Parts of messages that this test brings about on purpose."""
        self._errors: list[str] = []
        self._asked: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self._errors.append(str(error)))
        page.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._errors.append(message.text)

    def _on_request(self, request: Request) -> None:
        self._asked.append(request.url)

    def open(self, fragment: str = "") -> None:
        """Load the page and wait until it knows the server's models, or why it does not."""
        self.page.goto(f"{self.url}/{fragment}")
        expect(self.page.locator("#chat, #cluster").locator("visible=true")).to_have_count(1)

    def see(self, selector: str) -> Locator:
        """Return the element, once it is visible."""
        found = self.page.locator(selector)
        expect(found).to_be_visible()
        return found

    def say(self, text: str) -> None:
        """Send a message as a person would."""
        self.page.locator("#prompt").fill(text)
        self.page.locator("#prompt").press("Enter")

    @property
    def answers(self) -> Locator:
        return self.page.locator(".turn.assistant")

    def wait_for_end(self) -> None:
        """Wait until nothing is being generated."""
        expect(self.page.locator("#turns")).to_have_attribute("aria-busy", "false")

    @property
    def focus(self) -> str:
        """The id of the element that has the focus, or its text."""
        return str(
            self.page.evaluate(
                "document.activeElement.id || document.activeElement.textContent.trim()"
            )
        )

    def check(self) -> None:
        """Check that the page logged no error and asked no other server."""
        elsewhere = [url for url in self._asked if not url.startswith(self.url)]
        assert elsewhere == [], "requests left the origin"
        errors = [
            error
            for error in self._errors
            if not any(part in error for part in self.expected_errors)
        ]
        assert errors == [], "the console has errors"


class ClusterBackend(ScriptedBackend):
    """Scripted answers before a cluster of one prefill, one decode and one pool worker."""

    def status(self) -> Any:
        engine = WorkerLoad(
            num_running=1, num_free_blocks=60, num_total_blocks=100, num_cached_blocks=30
        )
        pool = WorkerLoad(
            num_free_blocks=25, num_total_blocks=100, counters={"ssd_blocks_written": 7.0}
        )
        loads = {Role.PREFILL: engine, Role.DECODE: engine, Role.KVSTORE: pool}
        return ClusterStatus(
            ready=True,
            draining=False,
            workers=[
                WorkerStatus(
                    id=f"{role.value}-0", role=role, pid=1, host="h", node_id="n", state="up",
                    load=load, silent_s=0.0, cost_error_ratio=None,
                )
                for role, load in loads.items()
            ],
            pool=PoolStatus(
                num_nodes=1, num_total_blocks=100, num_used_blocks=75, total_bytes=100 << 20,
                used_bytes=75 << 20, num_indexed_blocks=80,
            ),
            load=LoadStatus(
                num_inflight=2, num_queued=0, num_prefilling=1, num_decoding=1,
                num_queued_tokens=10, num_context_tokens=20, num_free_blocks=60,
                num_total_blocks=100,
            ),
            counters={},
        )  # fmt: skip


class ApiServerThread:
    """An API server over a `ScriptedBackend`, served by a loop in a thread; a context."""

    def __init__(
        self, script: Script, config: ApiConfig | None = None, receipts: Receipts | None = None
    ) -> None:
        self.url = ""
        self._receipts = receipts
        self._script = script
        self._config = config or ApiConfig(port=0, drain_s=0.2, feed_s=0.05)
        self._serving = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    async def _main(self) -> None:
        try:
            self.loop = asyncio.get_running_loop()
            self.backend = ClusterBackend(self._script)
            self._stop = asyncio.Event()
            self.app = create_app(
                self.backend,
                tiny_model(max_model_len=8192),
                self._config,
                recent=lambda: Recent().status(0.0),
                receipts=self._receipts,
            )
            await serve(self.app, self._config, stop=self._stop, ready=self._ready)
        finally:
            self._serving.set()

    def _ready(self, host: str, port: int) -> None:
        self.url = f"http://{host}:{port}"
        self._serving.set()

    def resume(self) -> None:
        """Let the script that hangs go on, once it does."""
        self._wait_for(lambda: self.backend.num_hanging > 0)
        self.loop.call_soon_threadsafe(self.backend.resume)

    def wait_for_requests(self, number: int) -> None:
        """Wait until so many requests have come."""
        self._wait_for(lambda: len(self.backend.requests) >= number)

    def wait_until_idle(self) -> None:
        """Wait until no request runs."""
        self._wait_for(lambda: self.backend.num_running == 0)

    def wait_until_nobody_listens(self) -> None:
        """Wait until no client follows the cluster's feed."""
        self._wait_for(lambda: self.app.state.api_server.num_listeners == 0)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        async def wait() -> None:
            async with asyncio.timeout(LONG_S):
                while not condition():
                    await asyncio.sleep(0.01)

        asyncio.run_coroutine_threadsafe(wait(), self.loop).result()

    def prompts(self) -> list[str]:
        """Return the text of each prompt so far, control tokens included."""
        tokenizer = tiny_tokenizer()
        return [tokenizer.decode(request.prompt_tokens) for request in self.backend.requests]

    def __enter__(self) -> ApiServerThread:
        self._thread.start()
        assert self._serving.wait(LONG_S)
        assert self.url, "the server did not start"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LONG_S)
        assert not self._thread.is_alive(), "the server does not stop"
