"""The chat page over scripted answers: streaming, thinking, tool calls, stopping, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

from playwright.sync_api import expect

from mooncake.api.config import ApiConfig
from mooncake.base import Failure, GenerateRequest, OutputEvent
from tests.browser.support import ApiServerThread, Visit
from tests.support.api.cache_use import NUM_CACHED_TOKENS, USE
from tests.support.api.server import Script, answer, refusal, says, tiny_tokenizer

TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city":"Oslo"}<|tool_call_end|><|tool_calls_section_end|>'
)

ApiServers = Callable[..., ApiServerThread]
Visits = Callable[..., Visit]


def in_turn(*texts: str) -> Callable[[GenerateRequest], list[OutputEvent | None]]:
    """Answer each request with the next text, and hang where a text has a "|pause|"."""
    left = list(texts)

    def script(request: GenerateRequest) -> list[OutputEvent | None]:
        parts = left.pop(0).split("|pause|")
        encode = tiny_tokenizer().encode
        before = encode(parts[0])
        events: list[OutputEvent | None] = list(
            answer(request, encode("".join(parts) + "<|im_end|>"))
        )
        if len(parts) > 1:
            events.insert(len(before), None)
        return events

    return script


def test_an_answer_is_shown_while_it_is_made(api_server: ApiServers, visit: Visits) -> None:
    with_pause = api_server(in_turn("once upon|pause| a time"))
    page = visit(with_pause.url)
    page.say("tell me a tale")
    text = page.answers.locator(".text").last
    expect(text).to_have_text("once upon")
    expect(page.see("#stop")).to_be_enabled()
    expect(page.page.locator("#turns")).to_have_attribute("aria-busy", "true")
    with_pause.resume()
    expect(text).to_have_text("once upon a time")
    page.wait_for_end()
    expect(page.page.locator(".foot")).to_contain_text("tokens · first after")
    expect(page.page.locator("#status")).to_contain_text("Done")
    assert page.focus == "prompt"


def test_an_answer_says_where_cached_tokens_of_its_prompt_came_from(
    api_server: ApiServers, visit: Visits
) -> None:
    tokens = tiny_tokenizer().encode("hello<|im_end|>")
    cached = api_server(
        lambda asked: answer(asked, tokens, num_cached_tokens=NUM_CACHED_TOKENS, cache=USE)
    )
    page = visit(cached.url)
    page.say("hi")
    page.wait_for_end()
    foot = page.page.locator(".foot")
    expect(foot).to_contain_text("prompt tokens cached (128 hbm, 64 peer)")
    expect(foot).to_contain_text("computed again: 256 evicted")


def test_the_conversation_and_the_settings_are_in_the_request(
    api_server: ApiServers, visit: Visits
) -> None:
    served = api_server(says("fine"))
    page = visit(served.url)
    page.page.locator("#system").fill("be brief")
    page.page.locator("#temperature").fill("0.3")
    page.page.locator("#top_p").fill("0.5")
    page.page.locator("#seed").fill("7")
    page.page.locator("#max_tokens").fill("20")
    page.say("how are you")
    expect(page.answers).to_have_count(1)
    page.wait_for_end()
    page.say("and you")
    expect(page.answers).to_have_count(2)
    page.wait_for_end()
    prompt = served.prompts()[1]
    for part in ("be brief", "how are you", "fine", "and you"):
        assert part in prompt
    sampling = served.backend.requests[1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.3, 0.5, 20)
    page.page.get_by_role("button", name="New chat").click()
    expect(page.page.locator("#welcome")).to_be_visible()
    page.say("start over")
    expect(page.answers).to_have_count(1)
    page.wait_for_end()
    assert "how are you" not in served.prompts()[2]


def test_thinking_is_folded_away_and_opens(api_server: ApiServers, visit: Visits) -> None:
    served = api_server(in_turn("<think>let me see</think>|pause|forty two"))
    page = visit(served.url)
    page.say("what is it")
    summary = page.see(".thinking summary")
    served.resume()
    page.wait_for_end()
    expect(summary).to_contain_text("Thought for")
    expect(page.answers.locator("> .text")).to_have_text("forty two")
    thoughts = page.page.locator(".thinking .text")
    expect(thoughts).to_be_hidden()
    summary.press("Enter")
    expect(thoughts).to_be_visible()
    expect(thoughts).to_have_text("let me see")
    summary.press("Enter")
    expect(thoughts).to_be_hidden()


def test_a_tool_call_is_shown_and_its_result_goes_back(
    api_server: ApiServers, visit: Visits
) -> None:
    served = api_server(in_turn(CALL, "cold then"))
    page = visit(served.url)
    page.page.locator("#tools").fill(json.dumps(TOOL))
    page.say("weather?")
    expect(page.see(".call .call-name")).to_have_text("get_weather")
    result = page.page.get_by_label("Result of get_weather")
    expect(result).to_be_focused()
    assert json.loads(page.page.locator(".call pre").inner_text()) == {"city": "Oslo"}
    assert '"name":"get_weather"' in served.prompts()[0]
    result.fill("minus 4")
    page.page.get_by_role("button", name="Send results").click()
    expect(page.answers.nth(1).locator("> .text")).to_have_text("cold then")
    page.wait_for_end()
    prompt = served.prompts()[1]
    assert "## Return of functions.get_weather:0\nminus 4" in prompt


def test_tools_that_are_not_json_are_refused_on_the_spot(
    api_server: ApiServers, visit: Visits
) -> None:
    served = api_server(says("never"))
    page = visit(served.url)
    page.page.locator("#tools").fill("[{]")
    expect(page.see("#tools-error")).to_contain_text("Tools:")
    page.say("weather?")
    expect(page.page.locator("#tools")).to_be_focused()
    expect(page.answers).to_have_count(0)
    assert served.backend.requests == []
    page.page.get_by_role("button", name="Insert an example").click()
    expect(page.page.locator("#tools-error")).to_be_hidden()


def test_stopping_aborts_and_keeps_what_was_said(api_server: ApiServers, visit: Visits) -> None:
    served = api_server(in_turn("as far as|pause| never", "|pause|", "again"))
    page = visit(served.url)
    stops: list[Callable[[], None]] = [
        lambda: page.page.get_by_role("button", name="Stop").click(),
        lambda: page.page.keyboard.press("Escape"),
    ]
    for number, stop in enumerate(stops, 1):
        page.say("go on")
        served.wait_for_requests(number)
        if number == 1:
            expect(page.answers.locator("> .text")).to_have_text("as far as")
        stop()
        page.wait_for_end()
        expect(page.page.locator(".foot")).to_have_count(number)
        expect(page.page.locator(".foot").last).to_contain_text("stopped")
        assert page.focus == "prompt"
        served.wait_until_idle()
        assert len(served.backend.aborted) == number
    expect(page.answers.first.locator("> .text")).to_have_text("as far as")
    page.say("once more")
    expect(page.answers.last.locator("> .text")).to_have_text("again")


def test_a_new_chat_forgets_the_answer_that_was_being_made(
    api_server: ApiServers, visit: Visits
) -> None:
    served = api_server(in_turn("old news|pause| never", "fresh"))
    page = visit(served.url)
    page.say("first question")
    expect(page.answers.locator("> .text")).to_have_text("old news")
    page.page.get_by_role("button", name="New chat").click()
    page.wait_for_end()
    served.wait_until_idle()
    expect(page.page.locator(".turn")).to_have_count(0)
    page.say("second question")
    expect(page.answers.locator("> .text")).to_have_text("fresh")
    assert "first question" not in served.prompts()[1]
    assert "old news" not in served.prompts()[1]


def test_a_refusal_says_why_and_can_be_tried_again(api_server: ApiServers, visit: Visits) -> None:
    left: list[Script] = [
        lambda request: refusal(
            request,
            Failure(status=429, error_type="RateLimitError", message="Too busy.", retry_after_s=2),
        ),
        says("better now"),
    ]

    def script(request: GenerateRequest) -> Iterable[OutputEvent | None]:
        return left.pop(0)(request)

    served = api_server(script)
    page = visit(served.url)
    page.expected_errors = ("429",)
    page.say("hello")
    alert = page.page.get_by_role("alert").filter(has_text="Too busy. Try again in 2 s.")
    expect(alert).to_be_visible()
    page.page.get_by_role("button", name="Try again").click()
    expect(page.answers.locator("> .text")).to_have_text("better now")
    expect(alert).to_have_count(0)


def test_text_of_the_model_stays_text(api_server: ApiServers, visit: Visits) -> None:
    nasty = "<img src=x onerror=alert(1)><script>alert(2)</script> ```py\nx = '<b>'\n``` end"
    served = api_server(says(nasty))
    page = visit(served.url)
    page.say("<i>hi</i>")
    page.wait_for_end()
    expect(page.answers.locator("> .text")).to_contain_text("<img src=x onerror=alert(1)><script>")
    expect(page.answers.locator("pre code")).to_have_text("x = '<b>'")
    expect(page.answers.locator("> .text")).to_contain_text("end")
    expect(page.page.locator(".turn.user .text")).to_have_text("<i>hi</i>")
    expect(page.page.locator("#turns :is(img, script, b, i)")).to_have_count(0)


def test_the_demo_model_comes_with_questions(api_server: ApiServers, visit: Visits) -> None:
    page = visit(api_server(says("fine")).url)
    expect(page.page.locator("#welcome")).to_have_text("What would you like to know?")
    models = json.dumps({"data": [{"id": "k2-demo"}]})
    page.page.route("**/v1/models", lambda route: route.fulfill(body=models))
    page.page.reload()
    expect(page.page.locator("#welcome button")).to_have_count(3)
    page.expected_errors = ("404",)  # the server behind has another model
    page.page.get_by_role("button", name="What is Mooncake?").click()
    expect(page.page.locator(".turn.user .text")).to_have_text("What is Mooncake?")
    expect(page.page.locator(".turn.error .text")).to_contain_text("k2-demo")


def test_a_server_with_keys_asks_for_one(api_server: ApiServers, visit: Visits) -> None:
    config = ApiConfig(port=0, drain_s=0.2, api_keys=("sesame",))
    served = api_server(says("welcome"), config=config)
    page = visit(served.url)
    page.expected_errors = ("401",)
    expect(page.page.locator("#welcome")).to_contain_text("API key")
    page.page.get_by_label("API key").fill("sesame")
    page.page.get_by_label("API key").press("Tab")
    expect(page.page.locator("#model option")).to_have_count(2)
    page.say("open")
    expect(page.answers.locator("> .text")).to_have_text("welcome")
