"""The receipt of an answer on the chat page: asked for when it is opened, and shown as bars."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import expect

from mooncake.base import FinishReason, GenerateRequest, MonotonicClock, OutputEvent
from mooncake.base.request import WorkSpan
from mooncake.telemetry.events import Accepted, Finished, FirstToken, Placed, Worked
from mooncake.telemetry.receipts import Receipts
from tests.browser.support import ApiServerThread, Visit
from tests.support.api.server import answer, says, tiny_tokenizer

ApiServers = Callable[..., ApiServerThread]
Visits = Callable[..., Visit]


def told(receipts: Receipts, request: GenerateRequest) -> list[OutputEvent]:
    """Answer a request, and tell what a cluster would have told of it."""
    name, now = request.request_id, MonotonicClock().now()
    spans = (
        WorkSpan("prefill", "prefill-1", 1.0, 1.5),
        WorkSpan("transfer", "prefill-1", 1.25, 1.5, {"mooncake.path": "shm"}),
    )
    for event in (
        Accepted(request_id=name, at_s=now, num_prompt_tokens=9, max_tokens=9),
        Placed(
            request_id=name, at_s=now, attempt=1, prefill="prefill-1", decode="decode-0",
            predicted_ttft_s=0.25, predicted_tbt_s=0.02, num_cached_tokens=0,
        ),
        Worked(request_id=name, at_s=now + 0.5, attempt=1, spans=spans),
        FirstToken(request_id=name, at_s=now + 0.5, worker_id="prefill-1", num_cached_tokens=0),
        Finished(
            request_id=name, at_s=now + 1.0, reason=FinishReason.STOP, num_prompt_tokens=9,
            num_output_tokens=2,
        ),
    ):  # fmt: skip
        receipts.record(event)
    return answer(request, tiny_tokenizer().encode("hello<|im_end|>"))


def test_a_receipt_opens_below_its_answer(api_server: ApiServers, visit: Visits) -> None:
    receipts = Receipts(4, MonotonicClock(), "gw")
    page = visit(api_server(lambda request: told(receipts, request), receipts=receipts).url)
    page.say("hi")
    page.wait_for_end()
    summary = page.see(".receipt summary")
    expect(page.page.locator(".step")).to_have_count(0)
    summary.press("Enter")
    body = page.see(".receipt-body")
    expect(body).to_contain_text(
        "prefill-1 → decode-0: first token predicted after 250.0 ms, came after 500.0 ms"
    )
    steps = page.page.locator(".step")
    expect(steps).to_have_count(3)
    expect(steps.nth(0)).to_contain_text("queue, gateway")
    expect(steps.nth(1)).to_contain_text("prefill, prefill-1")
    expect(steps.nth(2)).to_have_attribute("title", "path shm")
    lefts = [
        float(steps.nth(n).locator(".track div").evaluate("e => e.offsetLeft")) for n in (1, 2)
    ]
    assert lefts[0] < lefts[1], "the transfer began after the prefill"


def test_a_receipt_that_is_gone_says_so(api_server: ApiServers, visit: Visits) -> None:
    receipts = Receipts(1, MonotonicClock(), "gw")
    page = visit(api_server(says("hello"), receipts=receipts).url)
    page.expected_errors = ("404",)
    page.say("hi")
    page.wait_for_end()
    receipts.open("gw-newer", "c", "", ["r"], 0)
    page.see(".receipt summary").click()
    expect(page.see(".receipt .wrong")).to_contain_text("is here: the gateway")


def test_a_server_that_keeps_none_shows_none(api_server: ApiServers, visit: Visits) -> None:
    page = visit(api_server(says("hello")).url)
    page.say("hi")
    page.wait_for_end()
    expect(page.page.locator(".receipt")).to_have_count(0)
