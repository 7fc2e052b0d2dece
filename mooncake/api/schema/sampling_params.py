"""`mooncake.SamplingParams`: the settings by which `LLM` and `AsyncLLM` generate.

The fields are those of the HTTP bodies, from the same classes. The engine does not see them: they
are checked against the model and become a `mooncake.base.SamplingParams`.
"""

from __future__ import annotations

from typing import Any

from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

from mooncake.api.errors import unknown_field, validation_error
from mooncake.api.schema.fields import AnswerFields, Count


class SamplingParams(AnswerFields):
    """How the answers to a prompt are generated, in vLLM's names. None = the model's default.

    >>> SamplingParams(temperature=0.7, top_p=0.9, max_tokens=200, stop=["\\n\\n"], logprobs=2)

    `structured_outputs` takes a dict: {"json": schema}, {"regex": …}, {"choice": […]} or
    {"grammar": …}.

    Raises:
        InvalidRequest: a field is out of range or unknown; the message names it.
    """

    logprobs: Count | None = None
    """Return the logprobs of the sampled tokens, and this many most likely ones for each."""

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, value: Any, handler: ModelWrapValidatorHandler[SamplingParams]) -> Any:
        try:
            params = handler(value)
        except ValidationError as error:
            raise validation_error(error, value) from error
        for name in params.model_extra or {}:
            raise unknown_field(name, cls.model_fields)
        return params
