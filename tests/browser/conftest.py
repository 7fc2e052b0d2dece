"""A headless chromium, an API server with scripted answers, a real server: what the page's tests
share.

The browser is the system's (Debian's chromium): none is ever downloaded, and without one the tests
skip. Every test ends with the console looked through and all requests known to be for the server.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, Page, sync_playwright

from mooncake.api.config import ApiConfig
from mooncake.telemetry.receipts import Receipts
from tests.browser.support import WAIT_MS, ApiServerThread, Visit
from tests.support.api.server import Script
from tests.support.serve.server_process import ServerProcess, nano_checkpoint

ARGUMENTS = (
    "--no-sandbox",  # tests run as root in containers, where the sandbox cannot be set up
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(
                executable_path=path, args=list(ARGUMENTS), timeout=WAIT_MS
            )
        except Error as error:
            pytest.skip(f"chromium does not start on this machine: {error.message[:300]}")
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """Open pages: `visit(url, width=…, color_scheme=…)`."""
    with ExitStack() as stack:

        def open_page(url: str, *, width: int = 1400, dark: bool = False) -> Visit:
            context = browser.new_context(
                viewport={"width": width, "height": 800},
                color_scheme="dark" if dark else "light",
                reduced_motion="reduce",
            )
            stack.callback(context.close)
            page: Page = context.new_page()
            page.set_default_timeout(WAIT_MS)
            visit = Visit(page, url)
            stack.callback(visit.check)
            visit.open()
            return visit

        yield open_page


@pytest.fixture
def api_server() -> Iterator[Callable[..., ApiServerThread]]:
    """Serve scripted answers: `api_server(script, config=…, receipts=…)`."""
    with ExitStack() as stack:

        def serve(
            script: Script, *, config: ApiConfig | None = None, receipts: Receipts | None = None
        ) -> ApiServerThread:
            return stack.enter_context(ApiServerThread(script, config, receipts))

        yield serve


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Serve k2-nano for real; two requests fill it."""
    checkpoint = nano_checkpoint(Path(tmp_path_factory.mktemp("model")))
    words = (
        "--port", "0", "--dtype", "float32", "--colocated", "--kvstore", "1",
        "--kv-cache-memory-bytes", "32MiB", "--kvstore-dram-bytes", "32MiB",
        "--max-waiting-requests", "2", "--no-self-profile",
    )  # fmt: skip
    with ServerProcess(str(checkpoint), *words) as server:
        server.wait_until_serving()
        yield server
        code, left = server.stop()
        assert (code, left) == (0, []), server.output
        assert "Traceback" not in server.output
