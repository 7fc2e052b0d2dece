"""The page over a real server of k2-nano: an answer, a stop, the cluster as it works."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
from playwright.sync_api import Route, expect

from mooncake.api.config import ApiConfig
from tests.browser.support import ApiServerThread, Visit
from tests.support.api.server import says
from tests.support.serve.server_process import ServerProcess
from tests.support.waiting import LONG_S

MAX_EVENTS = 120
"""Events of the cluster's feed, one a second, before `wait_for_load` gives up."""
LONG = 30_000
"""More tokens than are generated before a test has looked."""

Visits = Callable[..., Visit]


def wait_for_load(server: ServerProcess, wanted: int) -> None:
    """Follow the cluster until `wanted` sequences run in the engine and as many requests are in
    flight."""
    with httpx.stream("GET", f"{server.url}/v1/cluster/events", timeout=LONG_S) as feed:
        events = (line for line in feed.iter_lines() if line.startswith("data: "))
        for event in itertools.islice(events, MAX_EVENTS):
            status = json.loads(event.removeprefix("data: "))["status"]
            running = sum(worker["load"].get("num_running", 0) for worker in status["workers"])
            if running == status["load"]["num_inflight"] == wanted:
                return
    raise AssertionError(f"not {wanted} running: {status}")


@contextmanager
def generating(server: ServerProcess) -> Iterator[None]:
    """Keep one long generation running."""
    body = {"prompt": "x", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=LONG_S) as reply:
        lines = reply.iter_lines()
        next(lines)
        yield


def without_end(route: Route) -> None:
    """Let a request of the page go through, asking for tokens past the end of the text."""
    body: dict[str, Any] = json.loads(route.request.post_data or "{}")
    route.continue_(post_data=json.dumps(body | {"ignore_eos": True}))


def running(page: Visit, worker: str) -> Any:
    """Return the cell that says how many sequences a worker runs."""
    row = page.page.locator("#workers tbody tr").filter(has_text=worker)
    return row.locator("td.num").first


def test_an_answer_of_k2_nano_streams(server: ServerProcess, visit: Visits) -> None:
    page = visit(server.url)
    expect(page.page.locator("#model")).to_have_value("k2-nano")
    page.page.locator("#max_tokens").fill("24")
    page.page.route("**/v1/chat/completions", without_end)
    page.say("Hello there")
    expect(page.page.locator(".foot")).to_contain_text("24 tokens · first after")
    expect(page.page.locator(".foot")).to_contain_text("cut off at the token limit")
    assert page.answers.locator("> .text").inner_text().strip()


def test_a_call_that_a_real_model_must_make_is_shown(server: ServerProcess, visit: Visits) -> None:
    page = visit(server.url)
    page.page.get_by_role("button", name="Insert an example").click()
    page.page.get_by_label("Tool choice").select_option("required")
    page.page.locator("#max_tokens").fill("2000")
    page.page.locator("#seed").fill("1")
    page.say("What is the weather?")
    page.see(".call >> nth=0")
    page.wait_for_end()
    expect(page.page.locator(".call-name").first).to_have_text("get_weather")
    arguments = json.loads(page.page.locator(".call pre").first.inner_text())
    assert arguments["city"] in ("Beijing", "Oslo", "Paris")
    expect(page.page.get_by_label("Result of get_weather").first).to_be_focused()


def test_stop_ends_the_work_in_the_engine(server: ServerProcess, visit: Visits) -> None:
    wait_for_load(server, 0)
    before = server.get("/v1/cluster/status")["counters"].get("requests_abort", 0)
    page = visit(server.url)
    page.page.locator("#max_tokens").fill(str(LONG))
    page.page.route("**/v1/chat/completions", without_end)
    page.say("Count to a million")
    expect(page.answers.locator("> .text")).not_to_be_empty()
    wait_for_load(server, 1)
    page.page.keyboard.press("Escape")
    page.wait_for_end()
    expect(page.page.locator(".foot")).to_contain_text("stopped")
    wait_for_load(server, 0)
    assert server.get("/v1/cluster/status")["counters"]["requests_abort"] == before + 1


def test_the_cluster_page_follows_the_load(server: ServerProcess, visit: Visits) -> None:
    wait_for_load(server, 0)
    page = visit(server.url)
    page.page.get_by_role("link", name="Cluster", exact=True).click()
    expect(page.page.locator("#live")).to_have_text("live")
    for worker in ("decode-0", "kvstore-0"):
        expect(page.page.get_by_role("rowheader", name=worker)).to_be_visible()
    expect(running(page, "decode-0")).to_have_text("0")
    with ExitStack() as stack:
        for number in (1, 2):
            stack.enter_context(generating(server))
            expect(running(page, "decode-0")).to_have_text(str(number))
        figures = page.page.locator("#figures")
        expect(figures.locator(".figure", has_text="Requests")).to_contain_text("2")
        for name in ("TTFT", "TBT"):
            expect(figures.locator(".figure", has_text=name).locator("strong")).to_contain_text("s")
        third = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=LONG_S)
        assert third.status_code in (429, 503)  # two requests fill this server
        refused = page.page.locator("#refusals tbody tr").first
        expect(refused).to_contain_text(str(third.status_code))
        expect(refused).to_contain_text("ago")
    expect(running(page, "decode-0")).to_have_text("0")
    dram = page.page.locator("#tiers .card", has_text="DRAM")
    expect(dram).to_contain_text("32 MiB")


def test_experts_that_workers_share_are_shown_by_their_rows(
    server: ServerProcess, visit: Visits
) -> None:
    page = visit(server.url)
    with httpx.stream("GET", f"{server.url}/v1/cluster/events", timeout=LONG_S) as feed:
        line = next(line for line in feed.iter_lines() if line.startswith("data: "))
    news = json.loads(line.removeprefix("data: "))
    page.page.get_by_role("link", name="Cluster", exact=True).click()
    expect(page.page.locator("#live")).to_have_text("live")
    expect(page.page.locator("#experts")).to_be_hidden()
    engine = next(each for each in news["status"]["workers"] if each["role"] == "decode")
    engine["load"]["expert_rows"] = [1200, 0, 600]
    page.page.route(
        "**/v1/cluster/events",
        lambda route: route.fulfill(
            content_type="text/event-stream", body=f"data: {json.dumps(news)}\n\n"
        ),
    )
    page.page.get_by_role("link", name="Chat").click()
    page.page.get_by_role("link", name="Cluster", exact=True).click()
    heat = page.page.get_by_role("img", name="decode-0: 1,800 rows")
    expect(heat).to_be_visible()
    fields = heat.locator("span")
    expect(fields).to_have_count(3)
    expect(fields.first).to_have_attribute("title", "expert 0: 1,200 rows")
    shown = [float(each.evaluate("it => it.style.opacity")) for each in fields.all()]
    assert shown[0] == 1 > shown[2] > shown[1]


def test_the_page_leaves_the_feed_when_it_is_hidden(
    api_server: Callable[..., ApiServerThread], visit: Visits
) -> None:
    served = api_server(
        says("x"), config=ApiConfig(port=0, drain_s=0.2, feed_s=0.05, max_listeners=1)
    )
    page = visit(served.url)
    for _ in range(3):  # the only place for a listener is free again each time
        page.page.get_by_role("link", name="Cluster", exact=True).click()
        expect(page.page.locator("#live")).to_have_attribute("data-state", "live")
        page.page.get_by_role("link", name="Chat").click()
        expect(page.page.locator("#cluster")).to_be_hidden()
        served.wait_until_nobody_listens()
