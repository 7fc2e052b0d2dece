"""The served model as the API server knows it: tokenizer, template, names, limits, defaults."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from mooncake.api.text.chat_template import ChatTemplate, load_chat_template
from mooncake.api.text.tokenizer import Tokenizer, load_tokenizer
from mooncake.base import CheckpointError, ConfigError, ModelSpec
from mooncake.base.models.vocabulary import read_json

_log = logging.getLogger(__name__)


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults of the checkpoint (`generation_config.json`); requests win over them, and
    have the same bounds.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(ge=0.01, le=100)] = 1.0


_NEUTRAL: dict[str, Any] = {
    "num_beams": 1, "no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0,
    "bad_words_ids": None, "suppress_tokens": None, "begin_suppress_tokens": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "sequence_bias": None,
    "exponential_decay_length_penalty": None, "stop_strings": None, "watermarking_config": None,
    "guidance_scale": 1.0, "penalty_alpha": 0.0, "typical_p": 1.0, "top_h": None,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
}  # fmt: skip
"""Settings of `generation_config.json` that change tokens and are not supported -> the value with
which they change nothing, like null.
"""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Everything about the model that requests are checked against and rendered with."""

    tokenizer: Tokenizer
    template: ChatTemplate
    spec: ModelSpec
    names: tuple[str, ...]
    max_model_len: int
    """Prompt plus output never exceed this many tokens."""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    eos_token_ids: tuple[int, ...] = ()
    created_s: int = 0
    """When the checkpoint's `config.json` was written, as a Unix time; /v1/models shows it."""

    @property
    def name(self) -> str:
        """The name that replies carry."""
        return self.names[0]


def load_served_model(
    path: Path, *, names: tuple[str, ...] = (), max_model_len: int | None = None
) -> ServedModel:
    """Read what the API server needs from the checkpoint directory `path` (no weights).

    Raises:
        CheckpointError: a file is missing or broken; the message names it.
        ConfigError: `max_model_len` is longer than the model's context.
    """
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: no config.json there; is it a checkpoint directory?")
    spec = ModelSpec.from_config(read_json(path / "config.json"))
    limit = spec.max_position_embeddings
    if max_model_len is not None and not 1 <= max_model_len <= limit:
        raise ConfigError(
            f"max_model_len: {max_model_len} is not in the range of this model; give 1 to {limit} "
            "tokens"
        )
    tokenizer = load_tokenizer(path)
    generation = _read_generation(path / "generation_config.json")
    return ServedModel(
        tokenizer=tokenizer,
        template=load_chat_template(path, tokenizer),
        spec=spec,
        names=names or (path.name,),
        max_model_len=max_model_len or limit,
        defaults=generation,
        eos_token_ids=_eos_ids(generation, spec, tokenizer),
        created_s=int((path / "config.json").stat().st_mtime),
    )


class _GenerationFile(GenerationDefaults, frozen=True, kw_only=True):
    """What a `generation_config.json` says."""

    eos_token_id: int | list[int] = []
    do_sample: bool = True
    """Whether answers are sampled, for transformers; it changes nothing here."""


def _read_generation(file: Path) -> _GenerationFile:
    """Read `file`; a missing one says nothing.

    Raises:
        CheckpointError: a value is wrong, or changes tokens in a way that is not supported.
    """
    said = {key: value for key, value in read_json(file).items() if value not in (None, [])}
    for key, neutral in _NEUTRAL.items():
        if said.get(key, neutral) != neutral:
            raise CheckpointError(
                f"{file}: {key}={said[key]!r:.80} is not supported; take it out to serve the model "
                "without it"
            )
    try:
        read = msgspec.convert(said, _GenerationFile)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    if not read.do_sample and read.temperature > 0:
        _log.warning(
            "%s: do_sample=false changes nothing: requests without a temperature are sampled at "
            "%g; set temperature to 0 there for greedy answers",
            file,
            read.temperature,
        )
    return read


def _eos_ids(generation: _GenerationFile, spec: ModelSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return every id that ends an answer: Kimi-K2's two files name different ones."""
    named = generation.eos_token_id
    ids = [*([named] if isinstance(named, int) else named), *spec.eos_token_ids]
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(token for token in ids if 0 <= token < spec.vocab_size))
