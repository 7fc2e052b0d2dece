"""The state that all routes and `LLM` share: backend, model, settings, and the set of running
calls.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from mooncake import __version__
from mooncake.api.backend import Backend, EventStream, GatewayBackend
from mooncake.api.config import ApiConfig
from mooncake.api.constrained.checker import SchemaChecker, SchemaToCheck
from mooncake.api.constrained.constraints import Constraint
from mooncake.api.errors import shorten
from mooncake.api.generation.beam_search import BeamStream
from mooncake.api.generation.generation import Call, Choice, TextOptions
from mooncake.api.generation.review import Review
from mooncake.api.generation.sampling import (
    check_amounts,
    check_sequences,
    choice_seed,
    request_priority,
)
from mooncake.api.lane import Lane, Look
from mooncake.api.model import ServedModel
from mooncake.api.running_calls import Serving
from mooncake.api.schema.fields import GenerationFields, RequestBody, SharedFields
from mooncake.api.text.answer import THINK_MARKERS, TOOL_MARKERS, Marker, find_markers
from mooncake.api.text.conversation import Guard
from mooncake.api.text.tokenizer import Window
from mooncake.base import (
    GenerateRequest,
    IdSource,
    InvalidRequest,
    ModelNotFound,
    MooncakeError,
    SamplingParams,
    SystemIds,
    Unavailable,
    pack_tokens,
)
from mooncake.base.cluster_mode import ClusterMode
from mooncake.telemetry.health import Probe, Vitals, judge
from mooncake.telemetry.receipts import Receipts

_log = logging.getLogger(__name__)

THREAD_CHARS = 20_000
"""Longer texts are encoded in a thread (about 5 ms of work), so that streams do not stutter."""
THREAD_SEQUENCES = 128
"""Calls with more sequences are made in a thread: a thousand take about 50 ms."""
LANE_PLACES = 4096
"""Number of texts, and of schemas, that may wait in their lanes. A script may ask for a thousand
answers at once.
"""

MAX_LOGGED_NAMES = 16


@dataclass(frozen=True)
class Kept:
    """What the pool is to keep of a call whose fields ask for it."""

    num_leading: int | None = None
    """Leading tokens of each prompt; None: whole prompts, and the answers if the next turn begins
    with them.
    """
    answer: bool = True
    """Whether the next turn begins with the answer; where a `call_token` is given, only an answer
    with one of these.
    """
    call_token: int | None = None

    def num_tokens(self, prompt: Sequence[int]) -> int:
        """Return how many leading tokens of a prompt are kept."""
        return len(prompt) if self.num_leading is None else self.num_leading


KEEPS_ALL = Kept()


class ApiServer(Serving):
    """Makes calls and knows which are running. Only that set ever changes."""

    def __init__(
        self,
        backend: Backend,
        model: ServedModel,
        config: ApiConfig,
        *,
        ids: IdSource | None = None,
        wall_s: Callable[[], float] = time.time,
        recent: Callable[[], Any] | None = None,
        vitals: Callable[[], Sequence[Vitals]] | None = None,
        receipts: Receipts | None = None,
        control: GatewayBackend | None = None,
    ) -> None:
        """`recent` returns a summary of the last requests (`telemetry.metrics`) for the web page.
        `vitals` returns the state of this process' workers, if it has any.
        `receipts` get the events of `backend`. `control` carries out operators' orders.
        """
        super().__init__(config.drain_s)
        self.control = control
        self.backend = backend
        self.model = model
        self.config = config
        self.names = config.served_model_names or model.names
        self.fingerprint = f"mooncake-{__version__}"
        self.receipts = receipts
        self.recent = recent or dict
        self._vitals: Look[Sequence[Vitals]] = Look(vitals or list)
        """Reading them may wait for a busy loop."""
        self._metrics = {is_all: Look(partial(backend.metrics, is_all)) for is_all in (False, True)}
        """Reading the metrics of many workers takes seconds."""
        self.num_listeners = 0
        """Number of clients that follow the feed of cluster events."""
        self._stopping = asyncio.Event()
        self.think_markers = find_markers(model.tokenizer, THINK_MARKERS)
        """The markers of reasoning; empty when the model does not mark it."""
        self.tool_markers = find_markers(model.tokenizer, TOOL_MARKERS)
        """The markers of tool calls; empty when the model has no format that we know."""
        self.guard = None
        if not config.allow_special_tokens_in_chat:
            self.guard = Guard(model.tokenizer, [marker.value for marker in THINK_MARKERS])
        template = model.template.source
        self.thinks = bool(self.think_markers) and Marker.THINK_BEGIN.value in template
        """True if the model reasons by itself: its template contains think blocks."""
        self._ids = ids or SystemIds()
        self._wall_s = wall_s
        self.tokenizing = Lane("tokenizing", 2, LANE_PLACES)
        """The lane for texts: rendering, encoding, decoding. It has few threads, because they share
        Python's lock with the event loop for part of their work.
        """
        self.compiling = Lane("compiling-schemas", 2, LANE_PLACES)
        """The lane for the forms of answers, which take longer. So no text waits behind a
        schema.
        """
        self.writing = Lane("writing-answers", 2, math.inf)
        """The lane for long answers. Those of one tenant hold up neither texts nor probes. It
        refuses none, because they are computed already; each running request writes one at a time,
        so the bound of requests is theirs.
        """
        self._checker = SchemaChecker()

    @property
    def ready(self) -> bool:
        return not self.draining and self.backend.ready

    @property
    def not_ready(self) -> Unavailable:
        """The error that says why a request cannot be served now."""
        if self.draining:
            return self.shutting_down()
        mode = ClusterMode() if self.control is None else self.control.mode
        if not mode.is_open:
            return Unavailable(
                "not ready: the engines sleep (POST /wake_up)" if mode.sleep_level
                else "not ready: the cluster is paused (POST /resume)"
            )  # fmt: skip
        workers = " and ".join(f"no {role} worker" for role in self.backend.missing)
        return Unavailable(f"not ready: {workers or 'no worker'} takes requests")

    async def failing(self, probe: Probe) -> MooncakeError | None:
        if probe is Probe.READY:
            return None if self.ready else self.not_ready
        passes, verdict = judge(probe, await self._vitals.result())
        return None if passes else Unavailable(f"{verdict.status}: {verdict.reason}")

    async def metrics(self, for_operator: bool) -> bytes:
        return await self._metrics[for_operator].result()

    def status(self) -> Any:
        return self.backend.status()

    def drain(self) -> None:
        """Refuse new calls from now on, and end the feeds of cluster events."""
        super().drain()
        self._stopping.set()
        self.backend.drain()

    async def stopping(self) -> None:
        """Wait until the server shuts down."""
        await self._stopping.wait()

    def now_s(self) -> int:
        """Return the Unix time for `created` in replies."""
        return int(self._wall_s())

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound for a name that is not served. None means the served model."""
        if name is not None and name not in self.names:
            raise ModelNotFound(
                f"The model {shorten(name)} does not exist here; served: {', '.join(self.names)}",
                param="model",
            )

    def check_body(self, body: RequestBody) -> None:
        """Refuse another model and fields that cannot be honoured; log unknown fields.

        Raises:
            ModelNotFound: the body names another model.
            InvalidRequest: names the field and what to do instead.
        """
        self.check_model(body.model)
        if isinstance(body, SharedFields) and (unknown := body.refuse_unsupported()):
            names = ", ".join(shorten(name) for name in sorted(unknown)[:MAX_LOGGED_NAMES])
            _log.warning("%d unknown request fields were ignored: %s", len(unknown), names)

    def encode(
        self, text: str, *, add_special: bool, window: Window, chat: bool = False
    ) -> list[int]:
        """Tokenize a prompt, limited by `window`, or a rendered conversation. In a conversation,
        control tokens that messages spell are plain text, unless the settings allow them
        (`allow_special_tokens_in_chat`). Slow if `text` is long: call it in a thread.
        """
        if chat and self.guard is not None:
            return self.guard.encode(text, add_special=add_special, window=window)
        return self.model.tokenizer.encode(text, add_special=add_special, window=window)

    def new_id(self) -> str:
        """Return a fresh random id."""
        return self._ids.hex(16)

    def review(self, constraint: Constraint) -> Review | None:
        """Return the checker of answers under `constraint`; None = there is nothing to check. Slow:
        call it in a thread.
        """
        if constraint.answer is None and not constraint.tools:
            return None
        self._checker.warm_up()
        answer = None if constraint.answer is None else SchemaToCheck.of(constraint.answer)
        tools = {name: SchemaToCheck.of(schema) for name, schema in constraint.tools.items()}
        return Review(self._checker, answer, tools)

    def new_call(
        self,
        call_id: str,
        prompts: Sequence[tuple[list[int], SamplingParams]],
        fields: GenerationFields,
        options: TextOptions,
        review: Review | None = None,
        kept: Kept = KEEPS_ALL,
    ) -> Call:
        """Return the call of these prompts, not yet started: `n` sequences for each prompt.
        `review` checks finished answers.

        Clients may choose the same id for two calls, here or at another gateway. So the ids that
        the cluster sees end in the gateway's name and a random part.

        Raises:
            Unavailable: the server is draining.
            InvalidRequest: too many sequences, beams or log-probabilities, or beam search together
                with a grammar.
        """
        if self.draining:
            raise self.shutting_down()
        if fields.use_beam_search and any(sampling.grammar for _, sampling in prompts):
            raise InvalidRequest(
                "use_beam_search: not together with tools or a form of the answer; leave one of "
                "them out",
                param="use_beam_search",
            )
        check_sequences(len(prompts), fields, self.config)
        check_amounts(prompts, fields)
        width = max(fields.n or 1, fields.best_of or 1)
        n = (fields.n or 1) if fields.use_beam_search else width
        seed = self._ids.integer(64) if fields.seed is None else fields.seed
        receipt_id = "-".join(filter(None, (self.config.gateway_id, self._ids.hex(4))))
        requests = self._requests(prompts, fields, seed, f"{call_id}-{receipt_id}", n, kept)
        choices = [
            Choice(which, request, self.model.tokenizer, options, self.model.eos_token_ids)
            for which, request in enumerate(requests)
        ]
        open_stream: Callable[[Sequence[GenerateRequest]], EventStream | BeamStream]
        if fields.use_beam_search:
            penalty = 1.0 if fields.length_penalty is None else fields.length_penalty
            open_stream = partial(
                BeamStream, self.backend, num_per_prompt=n, width=width, length_penalty=penalty
            )
        else:
            open_stream = partial(EventStream, self.backend)
        return Call(
            open_stream, call_id, requests, choices, n, num_kept=fields.n or 1, review=review,
            receipt_id=receipt_id, is_traceable=not fields.use_beam_search,
        )  # fmt: skip

    def _requests(
        self,
        prompts: Sequence[tuple[list[int], SamplingParams]],
        fields: GenerationFields,
        seed: int,
        name: str,
        n: int,
        kept: Kept,
    ) -> list[GenerateRequest]:
        """Return `n` requests for each prompt, which are named `name` and a number. `seed` is that
        of the call.
        """
        requests: list[GenerateRequest] = []
        for tokens, sampling in prompts:
            num_kept = kept.num_tokens(tokens) if fields.keep_s else 0
            keeps = kept.answer and num_kept == len(tokens) and not fields.use_beam_search
            prompt = pack_tokens(tokens)
            others = msgspec.structs.replace(sampling, num_prompt_logprobs=None)
            for which in range(n):
                # Those of the prompt are computed once: only the first choice has them.
                settings = others if which else sampling
                requests.append(
                    GenerateRequest(
                        request_id=f"{name}-{len(requests)}",
                        prompt=prompt,
                        sampling=msgspec.structs.replace(settings, seed=choice_seed(seed, which)),
                        cache_salt=fields.cache_salt or "",
                        priority=request_priority(fields),
                        num_kept_tokens=num_kept,
                        keep_s=fields.keep_s,
                        keeps_answer=keeps,
                        call_token=kept.call_token if keeps else None,
                    )
                )
        return requests

    def close(self) -> None:
        """Close what serves the calls: threads, and the process that checks answers. No call runs
        any more.
        """
        self.tokenizing.close()
        self.compiling.close()
        self.writing.close()
        self._checker.close()
