"""The served model as the API server knows it: tokenizer, template, names, limits, defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mooncake.api.text.chat_template import ChatTemplate, load_chat_template
from mooncake.api.text.tokenizer import Tokenizer, load_tokenizer
from mooncake.base import CheckpointError, ConfigError, ModelSpec
from mooncake.base.vocabulary import read_json


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling defaults of the checkpoint (`generation_config.json`); requests win over them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


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
    """Unix time shown by /v1/models."""

    @property
    def name(self) -> str:
        """The name that replies carry."""
        return self.names[0]


def load_served_model(
    path: Path, *, names: tuple[str, ...] = (), max_model_len: int | None = None, created_s: int = 0
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
    generation = read_json(path / "generation_config.json")
    return ServedModel(
        tokenizer=tokenizer,
        template=load_chat_template(path, tokenizer.special_tokens),
        spec=spec,
        names=names or (path.name,),
        max_model_len=max_model_len or limit,
        defaults=_defaults(generation, path),
        eos_token_ids=_eos_ids(generation, spec, tokenizer),
        created_s=created_s,
    )


def _defaults(generation: dict[str, Any], path: Path) -> GenerationDefaults:
    known = {
        name: generation[name]
        for name in GenerationDefaults.__struct_fields__
        if generation.get(name) is not None
    }
    try:
        return msgspec.convert(known, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path / 'generation_config.json'}: {error}") from error


def _eos_ids(generation: dict[str, Any], spec: ModelSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return every id that ends an answer: Kimi-K2's two files name different ones."""
    named = generation.get("eos_token_id")
    ids = [named] if isinstance(named, int) else list(named or [])
    ids += spec.eos_token_ids
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(token for token in ids if 0 <= token < spec.vocab_size))
