"""An API server with a scripted backend behind it, served on a free loopback port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from mooncake.api.app import create_app
from mooncake.api.config import ApiConfig
from mooncake.api.http.server import serve
from mooncake.api.model import GenerationDefaults, ServedModel
from mooncake.api.text.chat_template import KIMI_K2_TEMPLATE, ChatTemplate
from mooncake.api.text.tokenizer import TiktokenTokenizer
from mooncake.base import (
    Failure,
    FinalEvent,
    FinishReason,
    GenerateRequest,
    ModelSpec,
    OutputEvent,
    RequestOutput,
    Sink,
    TokenLogprobs,
)
from mooncake.base.request import NO_LOGPROBS, CacheUse, packed_logprobs
from mooncake.telemetry.events import Recorder
from mooncake.telemetry.receipts import Receipts
from mooncake.telemetry.traces import Tracer

SPECIAL_NAMES = {
    "[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4,
    "<|im_system|>": 10, "<|tool_calls_section_begin|>": 11, "<|tool_calls_section_end|>": 12,
    "<|tool_call_begin|>": 13, "<|tool_call_argument_begin|>": 14, "<|tool_call_end|>": 15,
    "<|im_middle|>": 17, "<think>": 22, "</think>": 23, "[PAD]": 255,
}  # fmt: skip
"""Offsets of Kimi-K2's special tokens from the end of the base ranks."""

MERGES = [
    "th", "the", " the", "he", "in", "er", "你", "好", "你好", "ell", "hell", "hello", " w",
]  # fmt: skip
MAX_MODEL_LEN = 256


def tiny_tokenizer() -> TiktokenTokenizer:
    """Return a tokenizer of all bytes, a few merges and Kimi-K2's special tokens by name."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {text.encode(): 256 + rank for rank, text in enumerate(MERGES)}
    base = len(ranks)
    added = {
        str(base + offset): {"content": name, "special": True}
        for name, offset in SPECIAL_NAMES.items()
    }
    return TiktokenTokenizer(
        ranks,
        {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]"},
    )


def tiny_model(
    *, max_model_len: int = MAX_MODEL_LEN, defaults: GenerationDefaults | None = None
) -> ServedModel:
    """Return a served model named "tiny" (also "alias") over `tiny_tokenizer`."""
    tokenizer = tiny_tokenizer()
    eos = tokenizer.special_id("<|im_end|>")
    assert eos is not None
    spec = ModelSpec.from_config(
        {
            "model_type": "kimi_k2", "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8, "v_head_dim": 8, "intermediate_size": 64,
            "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1,
            "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1,
            "topk_group": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0, "vocab_size": tokenizer.vocab_size,
            "max_position_embeddings": max_model_len, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        }
    )  # fmt: skip
    return ServedModel(
        tokenizer=tokenizer,
        template=ChatTemplate(KIMI_K2_TEMPLATE, tokenizer.special_tokens),
        spec=spec,
        names=("tiny", "alias"),
        max_model_len=max_model_len,
        defaults=defaults or GenerationDefaults(),
        eos_token_ids=(eos,),
        created_s=1_700_000_000,
    )


def logprobs_for(token: int, num_top: int | None) -> TokenLogprobs | None:
    """Return made-up but consistent logprobs: the token first, its successors after it."""
    if num_top is None:
        return None
    return TokenLogprobs(-0.5, 1, [(token + i, -0.5 - i) for i in range(num_top)])


def answer(
    request: GenerateRequest,
    tokens: list[int],
    *,
    group: int = 1,
    reason: FinishReason = FinishReason.STOP,
    num_cached_tokens: int = 0,
    cache: CacheUse | None = None,
) -> list[OutputEvent]:
    """Return the events of an answer, `group` tokens a step, as an engine would make them."""
    sampling = request.sampling
    tokens = tokens[: sampling.max_tokens]
    stop_id = None
    for at, token in enumerate(tokens):
        if token in sampling.stop_token_ids and at >= sampling.min_tokens:
            tokens, stop_id, reason = tokens[: at + 1], token, FinishReason.STOP
            break
    else:
        if len(tokens) == sampling.max_tokens:
            reason = FinishReason.LENGTH
    events: list[OutputEvent] = []
    for start in range(0, len(tokens), group):
        part = tokens[start : start + group]
        events.append(
            RequestOutput(
                request_id=request.request_id,
                attempt=0,
                start=start,
                tokens=part,
                logprobs=None
                if sampling.num_logprobs is None
                else [logprobs_for(token, sampling.num_logprobs) for token in part],
                prompt_logprobs=NO_LOGPROBS
                if sampling.num_prompt_logprobs is None or start
                else packed_logprobs(
                    [
                        logprobs_for(token, sampling.num_prompt_logprobs) if at else None
                        for at, token in enumerate(request.prompt_tokens)
                    ]
                ),
            )
        )
    events.append(
        FinalEvent(
            request_id=request.request_id,
            reason=reason,
            num_prompt_tokens=len(request.prompt_tokens),
            num_output_tokens=len(tokens),
            num_cached_tokens=num_cached_tokens,
            cache=cache,
            stop_token_id=stop_id,
        )
    )
    return events


def refusal(request: GenerateRequest, failure: Failure) -> list[OutputEvent]:
    """Return the one event of a request that was not accepted."""
    return [
        FinalEvent(
            request_id=request.request_id,
            reason=FinishReason.REJECTED,
            num_prompt_tokens=len(request.prompt_tokens),
            num_output_tokens=0,
            failure=failure,
        )
    ]


Script = Callable[[GenerateRequest], Iterable[OutputEvent | None]]


class ScriptedBackend:
    """Plays a script for each request, one event a turn of the loop; None in it means "hang".

    Keeps every request it got and the ids of those that were aborted while they ran.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.abort_seen = asyncio.Event()
        self.is_ready = True
        self.has_waiting_batch = False
        self.drained = False
        self._running: dict[str, tuple[GenerateRequest, Sink]] = {}
        self._hanging: list[tuple[str, Iterator[OutputEvent | None]]] = []

    @property
    def ready(self) -> bool:
        return self.is_ready

    @property
    def missing(self) -> list[str]:
        return [] if self.is_ready else ["prefill", "decode"]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_hanging(self) -> int:
        return len(self._hanging)

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        assert request.request_id not in self._running
        self.requests.append(request)
        self._running[request.request_id] = (request, sink)
        asyncio.get_running_loop().call_soon(
            self._play, request.request_id, iter(self.script(request))
        )

    def abort(self, request_id: str) -> None:
        if request_id not in self._running:
            return
        request, sink = self._running.pop(request_id)
        self.aborted.append(request_id)
        self.abort_seen.set()
        sink(
            FinalEvent(
                request_id=request_id,
                reason=FinishReason.ABORT,
                num_prompt_tokens=len(request.prompt_tokens),
                num_output_tokens=0,
                num_cached_tokens=3,
            )
        )

    def resume(self) -> None:
        """Go on with the scripts that hang."""
        hanging, self._hanging = self._hanging, []
        for request_id, events in hanging:
            self._play(request_id, events)

    def status(self) -> dict[str, object]:
        return {"workers": [], "ready": self.is_ready}

    def metrics(self, for_operator: bool) -> bytes:
        of_tenants = b"mooncake_of_tenants 1\n" if for_operator else b""
        return b"# TYPE mooncake_up gauge\nmooncake_up 1\n" + of_tenants

    def drain(self) -> None:
        self.drained = True

    def _play(self, request_id: str, events: Iterator[OutputEvent | None]) -> None:
        if request_id not in self._running:
            return
        event = next(events, None)
        if event is None:
            self._hanging.append((request_id, events))
            return
        sink = self._running[request_id][1]
        if isinstance(event, FinalEvent):
            del self._running[request_id]
        sink(event)
        asyncio.get_running_loop().call_soon(self._play, request_id, events)


def says(text: str, *, group: int = 1, end: str = "<|im_end|>", cached: int = 0) -> Script:
    """Return a script that answers every request with `text` and ends it."""
    tokens = tiny_tokenizer().encode(text + end)
    return lambda request: answer(request, tokens, group=group, num_cached_tokens=cached)


@contextlib.asynccontextmanager
async def live_api_server(
    backend: ScriptedBackend,
    *,
    config: ApiConfig | None = None,
    model: ServedModel | None = None,
    stop: asyncio.Event | None = None,
    tracer: Tracer | None = None,
    receipts: Receipts | None = None,
    recorder: Recorder | None = None,
) -> AsyncIterator[str]:
    """Serve an API server over `backend` and yield its base URL; stop it at the end."""
    config = config or ApiConfig(port=0, drain_s=0.2)
    app = create_app(
        backend,
        model or tiny_model(),
        config,
        tracer=tracer,
        receipts=receipts,
        recorder=recorder,
    )
    stop = stop or asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(
        serve(
            app,
            config,
            stop=stop,
            ready=lambda host, port: address.set_result(f"http://{host}:{port}"),
        )
    )
    await asyncio.wait({server, address}, return_when=asyncio.FIRST_COMPLETED)
    if not address.done():
        await server
    try:
        yield address.result()
    finally:
        stop.set()
        await server
