"""Renders a conversation as one text, by the checkpoint's own Jinja template in a sandbox.

The template is data of the checkpoint and not trusted. It runs in an immutable sandbox without
access to files or the network, and its errors become a 400. Kimi-K2's format is built in for
checkpoints that have its tokens and no template.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from mooncake.api.text.tokenizer import Tokenizer
from mooncake.base import CheckpointError, InvalidRequest
from mooncake.base.models.vocabulary import read_json

KIMI_K2_TEMPLATE = """\
{%- macro body(message) -%}
  {%- if message['content'] is string -%}
    {{- message['content'] -}}
  {%- elif message['content'] -%}
    {%- for part in message['content'] -%}
      {{- part['text'] if part['type'] == 'text' else '' -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- if messages and messages[0]['role'] != 'system' -%}
  <|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- if message['role'] == 'user' -%}
    <|im_user|>{{ message['name'] or 'user' }}<|im_middle|>
  {%- elif message['role'] == 'assistant' -%}
    <|im_assistant|>{{ message['name'] or 'assistant' }}<|im_middle|>
  {%- elif message['role'] == 'tool' -%}
    <|im_system|>{{ message['name'] or 'tool' }}<|im_middle|>
    {{- '## Return of ' ~ message['tool_call_id'] ~ '\\n' -}}
  {%- else -%}
    <|im_system|>{{ message['name'] or 'system' }}<|im_middle|>
  {%- endif -%}
  {{- body(message) -}}
  {%- if message['tool_calls'] -%}
    <|tool_calls_section_begin|>
    {%- for call in message['tool_calls'] -%}
      <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
      {%- if call['function']['arguments'] is string -%}
        {{- call['function']['arguments'] -}}
      {%- else -%}
        {{- call['function']['arguments'] | tojson -}}
      {%- endif -%}
      <|tool_call_end|>
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""
"""Kimi-K2's turns: no BOS, no newlines between turns, tools first, then the system turn."""

NO_TEMPLATE = """\
{{ raise_exception('the checkpoint has no chat template; add a chat_template.jinja, or send a text \
to /v1/completions') }}"""
"""Stands for the template of a checkpoint that has none and whose tokenizer is not Kimi-K2's."""

_TURN_MARK = "<|im_middle|>"
_END_MARK = "\ue0c1\ue0c2continue\ue0c2\ue0c1"
"""Private-use characters that mark the end of a last message that is to be continued."""


class ChatTemplate:
    """A compiled template, with the checkpoint's special tokens as variables."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._variables = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text.

        `continue_final_message` leaves the last message open, so that the model continues it.

        Raises:
            InvalidRequest: the template refused the conversation; the message says why.
        """
        turns = [dict(message) for message in messages]
        if continue_final_message:
            turns[-1]["content"] = f"{turns[-1].get('content') or ''}{_END_MARK}"
        variables = {"documents": None} | self._variables | dict(kwargs or {})
        variables |= {
            "messages": turns,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(variables)
        except Exception as error:  # a template is a program: it may raise anything
            raise InvalidRequest(
                f"the model's chat template refused the conversation: {error}", param="messages"
            ) from error
        if not continue_final_message:
            return text
        end = text.rfind(_END_MARK)
        if end < 0:
            raise InvalidRequest(
                "the model's chat template leaves out the last message, so it cannot be continued",
                param="continue_final_message",
            )
        return text[:end]


def load_chat_template(path: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Read the template of the checkpoint directory `path`. If there is none, use Kimi-K2's own
    where `tokenizer` has the tokens of its turns. Otherwise refuse every conversation.

    `chat_template.jinja` takes precedence over `chat_template` in `tokenizer_config.json`. If there
    are several named templates, the one named "default" is used.

    Raises:
        CheckpointError: the template is broken.
    """
    special_tokens = tokenizer.special_tokens
    file = path / "chat_template.jinja"
    if file.is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"), special_tokens)
    source = read_json(path / "tokenizer_config.json").get("chat_template")
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, dict)]
        source = {entry.get("name"): entry.get("template") for entry in entries}.get("default")
    if source is not None and not isinstance(source, str):
        raise CheckpointError(f"{path / 'tokenizer_config.json'}: chat_template is not a text")
    if not source:
        is_k2 = tokenizer.special_id(_TURN_MARK) is not None
        source = KIMI_K2_TEMPLATE if is_k2 else NO_TEMPLATE
    return ChatTemplate(source, special_tokens)


class _GenerationTag(jinja2.ext.Extension):
    """Parses `{% generation %}…{% endgeneration %}`, a mark for training, as its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as a plain class attribute)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_OF_DICTS = frozenset(dir(dict))


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with a short way to the fields of dicts."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return what `obj.attribute` is in a template. The sandbox first looks for an attribute,
        which raises an exception for each field of a message. It gives the same for a name that
        dicts do not have.
        """
        if type(obj) is dict and attribute not in _OF_DICTS and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as plain JSON: Jinja's own filter also escapes HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)
