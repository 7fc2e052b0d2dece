"""Templates run in a sandbox, give what Hugging Face's renderer gives, and fail with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest

from mooncake.api.text.chat_template import KIMI_K2_TEMPLATE, ChatTemplate, load_chat_template
from mooncake.api.text.tokenizer import load_tokenizer
from mooncake.base import CheckpointError, InvalidRequest
from tests.support.api.server import tiny_tokenizer
from tests.unit.api.text.test_tokenizer import write_tiktoken

SYSTEM = (
    "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI."
    "<|im_end|>"
)
KIMI = ChatTemplate(KIMI_K2_TEMPLATE)
ASK = "<|im_assistant|>assistant<|im_middle|>"


def user(content: object, **more: object) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([user("hi\n")], f"{SYSTEM}<|im_user|>user<|im_middle|>hi\n<|im_end|>{ASK}"),
        ([user("hi", name="bob")], f"{SYSTEM}<|im_user|>bob<|im_middle|>hi<|im_end|>{ASK}"),
        ([user("")], f"{SYSTEM}<|im_user|>user<|im_middle|><|im_end|>{ASK}"),
        ([user(None)], f"{SYSTEM}<|im_user|>user<|im_middle|><|im_end|>{ASK}"),
        (
            [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
            f"{SYSTEM}<|im_user|>user<|im_middle|>ab<|im_end|>{ASK}",
        ),
        (
            [{"role": "system", "content": " be brief "}, user("<b>&")],
            "<|im_system|>system<|im_middle|> be brief <|im_end|>"
            f"<|im_user|>user<|im_middle|><b>&<|im_end|>{ASK}",
        ),
    ],
)
def test_kimi_turns(messages: list[dict[str, Any]], expected: str) -> None:
    assert KIMI.render(messages) == expected


def test_kimi_tools_come_first_as_compact_json() -> None:
    tool = {"type": "function", "function": {"name": "look-up", "description": "查 <x>"}}
    text = KIMI.render([user("q")], tools=[tool])
    expected = json.dumps([tool], ensure_ascii=False, separators=(",", ":"))
    assert text.startswith(f"<|im_system|>tool_declare<|im_middle|>{expected}<|im_end|>{SYSTEM}")


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_kimi_tool_calls_and_results(arguments: object) -> None:
    call = {"id": "functions.f:0", "function": {"name": "f", "arguments": arguments}}
    text = KIMI.render(
        [
            user("q"),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "functions.f:0", "content": "42"},
        ],
        add_generation_prompt=False,
    )
    assert text.endswith(
        "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|><|tool_call_begin|>"
        'functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.f:0\n42<|im_end|>"
    )


def test_last_message_can_be_continued() -> None:
    text = KIMI.render(
        [user("q"), {"role": "assistant", "content": "It is "}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text.endswith("<|im_assistant|>assistant<|im_middle|>It is ")


def test_template_that_drops_the_last_message_cannot_continue_it() -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}")
    with pytest.raises(InvalidRequest, match="cannot be continued") as caught:
        template.render([user("a"), user("b")], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_messages_of_the_caller_are_not_changed() -> None:
    messages = [{"role": "assistant", "content": "x"}]
    KIMI.render(messages, continue_final_message=True)
    assert messages == [{"role": "assistant", "content": "x"}]


def test_own_functions_and_variables_of_templates() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson(indent=1) }}{% endgeneration %}{% endfor %}{{ thinking }}"
        "{{ strftime_now('%Y') | length }}",
        {"bos_token": "<s>"},
    )
    text = template.render([user("é"), user("b")], kwargs={"thinking": False})
    assert text == '<s>{\n "role": "user",\n "content": "é"\n}False4'


@pytest.mark.parametrize(
    "source",
    [
        "{{ m.role }} {{ m.content }} {{ m['name'] }}",
        "{{ m.name or 'nobody' }} {{ m.name is defined }}",
        "{{ m.items is callable }} {{ m.get('role') }}"
        "{% for k, v in m.items() %}{{ k }}{% endfor %}",
        "{{ m.pop }}",
    ],
)
def test_fields_are_what_the_sandbox_gives(source: str) -> None:
    fields = {"role": "user", "content": "hi", "get": "a field"}
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment()
    expected = sandbox.from_string(source).render(m=fields)
    assert ChatTemplate(f"{{% set m = messages[0] %}}{source}").render([fields]) == expected


def test_fields_of_messages_are_read_without_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each field that a message has, the sandbox would raise and catch one."""
    asked: list[str] = []
    plain = jinja2.sandbox.SandboxedEnvironment.getattr

    def counted(self: Any, obj: Any, attribute: str) -> Any:
        asked.append(attribute)
        return plain(self, obj, attribute)

    monkeypatch.setattr(jinja2.sandbox.SandboxedEnvironment, "getattr", counted)
    source = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.name or '' }}{% endfor %}"
    assert ChatTemplate(source).render([user("a"), user("b")]) == "userauserb"
    assert asked == ["name", "name"]


def test_blocks_leave_no_blank_lines() -> None:
    template = ChatTemplate(
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n"
    )
    assert template.render([user("a"), user("b")]) == "a\nb\n"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].missing.deeper }}",
        "{% include '/etc/passwd' %}",
        "{{ 1 // 0 }}",
        "{{ undefined_function() }}",
    ],
)
def test_what_a_template_may_not_do_is_a_refusal(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source).render([user("a")])
    assert caught.value.param == "messages"


def test_reason_of_the_template_reaches_the_client() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render([user("a")])


def test_broken_template_names_the_line() -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate("fine\n{% for %}")


def test_template_is_found_in_its_places(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, tiny_tokenizer()).source == KIMI_K2_TEMPLATE
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "from config"}))
    assert load_chat_template(tmp_path, tiny_tokenizer()).source == "from config"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_chat_template(tmp_path, tiny_tokenizer()).source == "d"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert load_chat_template(tmp_path, tiny_tokenizer()).source == "from file"


@pytest.mark.parametrize("config", [{}, {"chat_template": [{"name": "rag", "template": "x"}]}])
def test_conversations_need_a_template_of_the_models_own_tokens(
    tmp_path: Path, config: dict[str, object]
) -> None:
    """Kimi-K2's turns would be plain text to another tokenizer, and the model has not seen them."""
    write_tiktoken(tmp_path, config)
    template = load_chat_template(tmp_path, load_tokenizer(tmp_path))
    with pytest.raises(InvalidRequest, match=r"no chat template; add a chat_template\.jinja, or"):
        template.render([user("a")])


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write_tiktoken(tmp_path, {"chat_template": 5})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template"):
        load_chat_template(tmp_path, load_tokenizer(tmp_path))
