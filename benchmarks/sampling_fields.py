"""What each sampling field adds to a worker's step: `python -m benchmarks sampling-fields`.

One call of `n` sequences whose field has its dearest legal value, beside the same call without it:
the difference of their shortest steps, made in turn, without the model. "Plain torch" is what
computes where there is no compiled code. A step is what the worker does for its tokens: the
sampler, and whether each token ends its sequence. Times are CPU time of the step's thread, so other
work on the machine changes them little; masks of grammars are computed on other threads, while the
model runs. "Once a call" is what the settings of all sequences cost when it begins.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mooncake_kernels.dispatch import NATIVE
from mooncake_kernels.native import build

from benchmarks.support.servers import load, machine
from mooncake.api.bounds import (
    ALLOWED_IDS,
    BAD_WORD_TOKENS,
    BIASED_IDS,
    STOP_IDS,
    WORD_TOKENS,
)
from mooncake.base import GenerateRequest, Grammar, SamplingParams, pack_tokens
from mooncake.base.request import request_finish
from mooncake.engine.sequence import Sequence as EngineSequence
from mooncake.launch.host import environment
from mooncake.model.backends import Backends
from mooncake.model.grammars.following import Grammars
from mooncake.model.grammars.grammar_tokens import GrammarTokens
from mooncake.model.layers.sampler import PLAIN_OPS, Sampler, SamplingOps, sampling_ops

PROMPT = list(range(64))
PLAIN: Mapping[str, Any] = {"temperature": 1.0, "max_tokens": 10**6}
EXPRESSION = "start: /[0-9]*[a-z]*([A-Z][a-z]+)*/"


def dearest(vocab: int) -> dict[str, dict[str, Any]]:
    """Return each field at its dearest legal value."""
    token = 7  # the words below all but end in what is sampled: this token, always
    always = {"logit_bias": {token: 100.0}}  # of both calls that are compared
    chain = [[token] * length + [8] for length in range(1, WORD_TOKENS.limit)]
    pairs = (BAD_WORD_TOKENS.limit - sum(map(len, chain))) // 2
    words = chain + [[token, 9 + at % (vocab - 9)] for at in range(pairs)]
    singles = [[at % (vocab - 1) + 1] for at in range(BAD_WORD_TOKENS.limit)]
    return {
        "nothing (the noise)": {},
        "top_k": {"top_k": vocab // 2},
        "top_p": {"top_p": 0.999},
        "min_p": {"min_p": 0.01},
        "repetition_penalty": {"repetition_penalty": 1.1},
        "presence_penalty": {"presence_penalty": 0.5},
        "frequency_penalty": {"frequency_penalty": 0.5},
        "logit_bias": {"logit_bias": dict.fromkeys(range(min(vocab, BIASED_IDS.limit)), 0.5)},
        "logit_bias that outweighs": {"logit_bias": {token: 95.0}},
        "allowed_token_ids": {"allowed_token_ids": list(range(min(vocab - 1, ALLOWED_IDS.limit)))},
        "stop_token_ids": {"stop_token_ids": range(vocab - min(vocab - 1, STOP_IDS.limit), vocab)},
        "min_tokens, stop_token_ids": {
            "min_tokens": 10**6, "stop_token_ids": range(min(vocab - 1, STOP_IDS.limit)),
        },
        "bad_words of one token": {"bad_words": singles},
        "bad_words that nearly come": {"bad_words": words, **always},
        "logprobs of 20": {"num_logprobs": 20},
        "a grammar": {"grammar": Grammar(text=EXPRESSION, end_ids=[vocab - 1])},
    }  # fmt: skip


class Batch:
    """One call's sequences in a sampler."""

    def __init__(
        self,
        vocab: int,
        n: int,
        settings: Mapping[str, Any],
        grammars: Grammars,
        ops: SamplingOps = PLAIN_OPS,
    ) -> None:
        fields = dict(PLAIN) | dict(settings)
        fields["stop_token_ids"] = frozenset(fields.get("stop_token_ids", ()))
        self._sampler = Sampler(vocab, grammars, ops=ops)
        self._ids = list(range(n))
        self._outputs: list[list[int]] = [[] for _ in range(n)]
        self._requests = [
            GenerateRequest(
                request_id=f"r{number}",
                prompt=pack_tokens(PROMPT),
                sampling=SamplingParams(seed=number, **fields),
            )
            for number in range(n)
        ]
        begun = time.thread_time()
        for number, request in enumerate(self._requests):
            self._sampler.start(EngineSequence(number, request))
        self.begin_ms = 1e3 * (time.thread_time() - begun)

    def step(self, logits: torch.Tensor) -> float:
        """Return the milliseconds of one step."""
        begun = time.thread_time()
        self._sampler.broken(self._ids)
        tokens, _ = self._sampler.sample(logits, self._ids)
        for sequence_id, token in zip(self._ids, tokens, strict=True):
            output = self._outputs[sequence_id]
            output.append(token)
            request_finish(self._requests[sequence_id], output)
        return 1e3 * (time.thread_time() - begun)


def main(argv: Sequence[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks sampling-fields", description=__doc__
    )
    parser.add_argument("--vocab", type=int, default=1536, help="k2-demo's by default")
    parser.add_argument("--n", type=int, default=128, help="sequences in the batch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    table = [bytes([32 + at % 95]) * (1 + at // 95) for at in range(args.vocab)]
    grammars = Grammars(args.vocab, lambda: GrammarTokens(table, frozenset(), _spelled))
    logits = torch.randn(8, args.n, args.vocab)
    print(f"{machine()}; n={args.n}, {args.vocab} tokens, {args.threads} threads, load {load()}")
    ways = {"plain torch": PLAIN_OPS}
    if build.why_not() is None:
        build.keep_in(environment.cache_dir())
        ways["compiled"] = sampling_ops(Backends(NATIVE))
    print(f"| field | {' | '.join(f'CPU ms a step, {way}' for way in ways)} | once a call |")
    print("|---" * (len(ways) + 2) + "|")
    with torch.inference_mode():
        for name, settings in dearest(args.vocab).items():
            beside = {} if len(settings) < 2 else {"logit_bias": settings.get("logit_bias", {})}
            batches = [
                [Batch(args.vocab, args.n, each, grammars, ops) for each in (beside, settings)]
                for ops in ways.values()
            ]
            pairs = [
                [[batch.step(logits[at % 8]) for batch in pair] for pair in batches]
                for at in range(args.steps)
            ]
            added = []
            for pair in zip(*pairs[2:], strict=True):
                plain, asked = zip(*pair, strict=True)
                added.append(f"{min(asked) - min(plain):.2f}")
            once = batches[0][1].begin_ms - batches[0][0].begin_ms
            print(f"| {name} | {' | '.join(added)} | {once:.1f} |", flush=True)
    return 0


def _spelled(text: str) -> list[int]:
    return [ord(letter) - 32 for letter in text]
