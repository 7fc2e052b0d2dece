"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)

from mooncake.api.schema.fields import (
    CACHE_MARK,
    MAX_ITEMS,
    Count,
    GenerationFields,
    JsonObject,
    Markable,
    Positive,
)


class FunctionCall(JsonObject):
    """A call the model made earlier in the conversation."""

    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] = "{}"


class ToolCall(JsonObject):
    """One entry of `tool_calls` in an assistant's turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(Markable):
    """A piece of a message's content; this model takes text only."""

    type: str
    text: str | None = None

    @field_validator("type")
    @classmethod
    def _is_text(cls, value: str) -> str:
        if value not in ("text", "input_text", "output_text", "refusal"):
            raise ValueError(f"content of type {value[:40]!r} is not supported, only text")
        return value


class ChatMessage(Markable):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=MAX_ITEMS)] | None
    ) = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_ITEMS)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _result_names_its_call(self) -> ChatMessage:
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role tool needs the tool_call_id it answers")
        return self

    @property
    def mark_s(self) -> float:
        """The longest time for which a mark on it, or on a part of it, asks, or 0 if it has
        none.
        """
        parts = self.content if isinstance(self.content, list) else []
        return max([super().mark_s, *(part.mark_s for part in parts)])

    @property
    def text(self) -> str:
        """The content as one text; None and empty lists give the empty text."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""


class OfFunction(JsonObject):
    """An object whose type is always "function"."""

    type: Literal["function"]


class FunctionSpec(Markable):
    """A function the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """True: parameters that no grammar can follow as a whole are refused. Otherwise the part that
    can be followed is, and finished arguments are checked against the whole (`schema_errors`).
    """


class Tool(OfFunction, Markable):
    """One entry of `tools`."""

    function: FunctionSpec
    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep_raw(cls, value: Any, handler: ModelWrapValidatorHandler[Tool]) -> Tool:
        tool = handler(value)
        tool.remember(value)
        return tool

    def remember(self, raw: dict[str, Any]) -> None:
        """Keep the JSON that the client sent, with its order of fields, but no marks for caches:
        clients move these from turn to turn, and the prompt would change with them.
        """
        function = raw["function"]
        if CACHE_MARK in raw or CACHE_MARK in function:
            raw = {**_unmarked(raw), "function": _unmarked(function)}
        self._raw = raw

    @property
    def mark_s(self) -> float:
        """The time for which a mark on it, or on its function, asks, or 0 if it has none."""
        return max(super().mark_s, self.function.mark_s)

    @property
    def raw(self) -> dict[str, Any]:
        """The JSON that prompts contain."""
        return self._raw


def _unmarked(sent: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sent.items() if name != CACHE_MARK}


MAX_TOOLS = 1024

Messages = Annotated[list[ChatMessage], Field(fail_fast=True, max_length=MAX_ITEMS)]
Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]
Documents = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_ITEMS)]


class NamedFunction(JsonObject):
    """The function in a named `tool_choice`."""

    name: str


class NamedToolChoice(OfFunction):
    """`tool_choice` that names the function to call."""

    function: NamedFunction


class ChatRequest(GenerationFields):
    """Answer a conversation."""

    messages: Messages = Field(min_length=1)
    max_completion_tokens: Positive | None = None
    """Takes precedence over `max_tokens`, its older name."""
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    """"none" turns reasoning off if the model allows it; other values go to its template."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Documents | None = None

    @property
    def keep_s(self) -> float:
        """The longest time for which any field or mark asks."""
        marked = [*self.messages, *(self.tools or [])]
        return max([self.whole_keep_s, *(each.mark_s for each in marked)])

    @property
    def num_kept_messages(self) -> int:
        """How many leading messages are to be kept: those up to the last mark."""
        if self.whole_keep_s:
            return len(self.messages)
        marked = [number for number, each in enumerate(self.messages, start=1) if each.mark_s]
        return max(marked, default=0)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The variables for the chat template; `reasoning_effort` sets those for reasoning."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", self.reasoning_effort)
            if self.reasoning_effort == "none":
                kwargs.setdefault("thinking", False)
        return kwargs

    @property
    def thinking(self) -> bool | None:
        """True if the template is told to have the model reason; None = it is not told."""
        value = self.template_kwargs.get("thinking")
        return value if isinstance(value, bool) else None
