"""How the page is seen and used: by keyboard alone, on a narrow screen, in the dark."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.browser.support import ApiServerThread, Visit
from tests.support.api.server import says

ApiServers = Callable[..., ApiServerThread]
Visits = Callable[..., Visit]

MAX_TABS = 60
LEAST_CONTRAST = 4.5
"""WCAG 2, AA, for text of usual size."""

_CONTRAST = """(selector) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const pixel = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const parts = pixel(colour).slice(0, 3).map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (pixel(colour)[3] === 255) return colour;
    }
    return "white";
  };
  return [...document.querySelectorAll(selector)].map((element) => {
    const [dark, bright] = [light(getComputedStyle(element).color), light(behind(element))]
      .sort((left, right) => left - right);
    return (bright + 0.05) / (dark + 0.05);
  });
}"""
_BACKGROUND = "getComputedStyle(document.body).backgroundColor"
_OVERFLOW = "document.documentElement.scrollWidth - innerWidth"
_NAMELESS = """() => [...document.querySelectorAll("a, button, input, select, textarea, summary")]
  .filter((element) => element.checkVisibility())
  .filter((element) => !(element.labels?.length || element.getAttribute("aria-label")
    || element.textContent.trim()))
  .map((element) => element.outerHTML)"""


def tab_to(page: Visit, name: str, key: str = "Tab") -> None:
    """Press Tab until the element with this id or text has the focus."""
    for _ in range(MAX_TABS):
        if page.focus == name:
            return
        page.page.keyboard.press(key)
    raise AssertionError(f"{name} cannot be reached with {key}")


def test_everything_works_by_keyboard_alone(api_server: ApiServers, visit: Visits) -> None:
    page = visit(api_server(says("<think>hm</think>hello")).url)
    keyboard = page.page.keyboard
    expect(page.page.locator("#prompt")).to_be_focused()
    keyboard.type("line one")
    keyboard.press("Shift+Enter")
    keyboard.type("line two")
    assert page.page.locator("#prompt").input_value() == "line one\nline two"
    keyboard.press("Enter")
    expect(page.answers.locator("> .text")).to_have_text("hello")
    page.wait_for_end()
    tab_to(page, "skip", "Shift+Tab")
    expect(page.page.locator("#skip")).to_be_in_viewport()
    for name in ("to-chat", "to-cluster", "theme"):
        keyboard.press("Tab")
        assert page.focus == name
    tab_to(page, "skip", "Shift+Tab")
    keyboard.press("Enter")
    expect(page.page.locator("#prompt")).to_be_focused()
    summary = page.page.locator(".thinking summary")
    tab_to(page, summary.inner_text(), "Shift+Tab")
    keyboard.press("Space")
    expect(page.page.locator(".thinking .text")).to_be_visible()
    tab_to(page, "to-cluster", "Shift+Tab")
    keyboard.press("Enter")
    expect(page.page.locator("#cluster")).to_be_visible()
    tab_to(page, "skip", "Shift+Tab")
    keyboard.press("Enter")
    expect(page.page.locator("#cluster-title")).to_be_focused()
    assert page.page.evaluate(_NAMELESS) == []


def test_all_settings_can_be_reached_in_the_order_they_are_shown(
    api_server: ApiServers, visit: Visits
) -> None:
    page = visit(api_server(says("x")).url)
    expect(page.page.locator("#model option")).to_have_count(2)
    tab_to(page, "model", "Shift+Tab")
    for name in (
        "key", "system", "temperature", "top_p", "max_tokens", "seed", "thinking", "tools",
        "tools-example", "tool_choice", "prompt", "clear", "send",
    ):  # fmt: skip
        page.page.keyboard.press("Tab")
        assert page.focus == name
    assert page.page.evaluate(_NAMELESS) == []


@pytest.mark.parametrize("dark", [False, True])
def test_colours_follow_the_system_and_can_be_read(
    api_server: ApiServers, visit: Visits, dark: bool
) -> None:
    page = visit(api_server(says("<think>hm</think>hello")).url, dark=dark)
    page.say("hi")
    page.wait_for_end()
    background = "rgb(23, 23, 26)" if dark else "rgb(251, 250, 247)"
    assert page.page.evaluate(_BACKGROUND) == background
    texts = ".text, .turn h2, .foot, summary, button, label, .hint, .bar a, .brand, input, textarea"
    assert min(page.page.evaluate(_CONTRAST, texts)) >= LEAST_CONTRAST
    page.page.get_by_role("link", name="Cluster", exact=True).click()
    expect(page.page.locator("#live")).to_have_attribute("data-state", "live")
    texts = "#cluster :is(h1, h2, h3, dt, dd, th, td, p, .hint)"
    assert min(page.page.evaluate(_CONTRAST, texts)) >= LEAST_CONTRAST


def test_a_chosen_theme_goes_before_the_systems_and_is_remembered(
    api_server: ApiServers, visit: Visits
) -> None:
    page = visit(api_server(says("x")).url, dark=True)
    button = page.page.locator("#theme")
    dark = page.page.evaluate(_BACKGROUND)
    button.press("Enter")
    expect(button).to_have_text("Light")
    light = page.page.evaluate(_BACKGROUND)
    assert light != dark
    page.open()
    expect(button).to_have_text("Light")
    assert page.page.evaluate(_BACKGROUND) == light
    button.press("Enter")
    expect(button).to_have_accessible_name("Colours: dark")
    assert page.page.evaluate(_BACKGROUND) == dark


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_screen(
    api_server: ApiServers, visit: Visits, width: int
) -> None:
    long_word = "m" * 300
    page = visit(api_server(says(long_word)).url, width=width)
    page.say(long_word)
    page.wait_for_end()
    assert page.page.evaluate(_OVERFLOW) <= 0
    fold = page.page.locator("#settings-fold")
    if width == 400:
        expect(page.page.locator("#temperature")).to_be_hidden()
        fold.locator("summary").click()
    expect(page.page.locator("#temperature")).to_be_visible()
    assert page.page.evaluate(_OVERFLOW) <= 0
    expect(page.page.locator("#send")).to_be_in_viewport()
    page.page.get_by_role("link", name="Cluster", exact=True).click()
    expect(page.page.locator("#live")).to_have_attribute("data-state", "live")
    assert page.page.evaluate(_OVERFLOW) <= 0
