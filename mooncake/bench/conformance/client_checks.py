"""Checks that need only HTTP: what a client can do, and what it may expect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

from mooncake.api.http.client import RequestFailed
from mooncake.bench.conformance.endpoint import COMPLETIONS, HANDLE, Answer
from mooncake.bench.conformance.target import PROBE_TOKENS, Target, difference
from mooncake.bench.conformance.verdict import Failed, NotPossible
from mooncake.bench.server_counters import parse_metrics

ABORTS_AT_ONCE = 4
NUM_MIXED = 16
SHORT_TOKENS = 32
SHORT_OUTPUTS = 16
SHORT_ROUNDS = 12
LEAST_RATIO = 0.85
"""The share of the speed of a server that is not disaggregated, for short prompts."""
FAR = 10**6
"""The id of a block that no server has."""


# ---------------------------------------------------------------- aborts


async def aborts(target: Target) -> str:
    """Clients go away at every point of a request that they can see. All KV must become
    free again.
    """
    start = await target.settled_kv()
    probe = target.prompt(target.prompt_tokens)
    begun = time.monotonic()
    before = await target.whole(probe, PROBE_TOKENS)
    ttft_s = time.monotonic() - begun
    points: dict[str, tuple[float, int, dict[str, Any]]] = {
        "sent": (0.0, 0, {}),
        "in prefill": (ttft_s / 2, 0, {}),
        "at the first token": (0.0, 1, {}),
        "in mid-answer": (0.0, target.output_tokens // 2, {}),
        "before the last token": (0.0, target.output_tokens - 1, {}),
        "with four choices": (0.0, target.output_tokens, {"n": 4, "seed": 1}),
        "of an answer in one piece": (ttft_s, 0, {"stream": False}),
    }
    for wait_s, num_tokens, fields in points.values():
        work = [_leave(target, wait_s, num_tokens, fields) for _ in range(ABORTS_AT_ONCE)]
        await asyncio.gather(*work)
    seconds = await target.returns_to(start)
    await target.answers_again(probe, before)
    number = ABORTS_AT_ONCE * len(points)
    return f"{number} aborts ({', '.join(points)}); KV in use is {start:g} again {seconds:.1f} s on"


async def _leave(target: Target, wait_s: float, num_tokens: int, fields: dict[str, Any]) -> None:
    """Send a request and go away after `wait_s` seconds, or when `num_tokens` tokens have come."""
    enough, prompt = asyncio.Event(), target.prompt(target.prompt_tokens)

    def on_token(count: int) -> None:
        if count >= num_tokens:
            enough.set()

    asked = asyncio.create_task(
        target.main.complete(prompt, target.output_tokens, on_token, **fields)
    )
    if num_tokens:
        seen = asyncio.create_task(enough.wait())
        await asyncio.wait(
            (asked, seen), timeout=target.deadline_s, return_when=asyncio.FIRST_COMPLETED
        )
        seen.cancel()
    else:
        await asyncio.sleep(wait_s + 0.002)  # the request is written by then
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


# ---------------------------------------------------------------- the cache


async def cold_and_warm(target: Target) -> str:
    """A prompt gives the same answer when nothing of it is cached, when all is, and when a
    part is.
    """
    most = target.prompt_tokens
    lengths = sorted({17, 64, 65, most // 2, most})
    num_cached = 0
    for length in lengths:
        prompt = target.prompt(length)
        cold = await target.whole(prompt)
        for _ in range(2):
            warm = await target.whole(prompt)
            num_cached += warm.num_cached or 0
            _same(cold, warm, f"a prompt of {length} tokens, warm")
        branch = prompt[: length // 2] + target.prompt(length - length // 2)
        part = await target.whole(branch)
        salted = await target.whole(branch, cache_salt=f"s{target.draw.random()}")
        _same(salted, part, f"a prompt of {length} tokens whose first half was known")
    return (
        f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]} tokens: cold, twice warm, half "
        f"warm and salted alike; the server says that {num_cached} tokens came from its cache"
    )


async def hits(target: Target) -> str:
    """Clients learn how many tokens came from a cache, and operators how many were missed."""
    prompt = target.prompt(target.prompt_tokens)
    await target.whole(prompt, 1)
    warm = await target.whole(prompt, 1)
    if warm.num_cached is None:
        raise Failed("usage.prompt_tokens_details.cached_tokens is not in an answer")
    if not warm.num_cached:
        raise Failed(f"a prompt of {len(prompt)} tokens that was just sent counts as not cached")
    words = ("_miss", "evict", "failed", "corrupt")  # but no "admission"
    names = {name for name, _, _ in parse_metrics((await target.main.get("/metrics")).decode())}
    told = sorted(name for name in names if any(word in name for word in words))
    return (
        f"{warm.num_cached} of {len(prompt)} tokens are said to be cached; "
        f"counters of what was missed: {', '.join(told) or 'none'}"
    )


def _same(wanted: Answer, found: Answer, what: str) -> None:
    if found.tokens != wanted.tokens:
        raise Failed(f"{what}: {difference(wanted, found)}")


# ---------------------------------------------------------------- handles of KV


async def handles(target: Target) -> str:
    """A handle of KV that is forged, used up or old must give an error or the prompt's own
    answer.
    """
    is_given = await _handle(target, target.prompt(target.prompt_tokens)) is not None
    found = []
    for what, change in _FORGED.items():
        prompt = target.prompt(target.prompt_tokens)
        handle = change(await _given(target, prompt) if is_given else dict(_MADE_UP))
        found.append(f"{what}: {await _judged(target, what, prompt, handle)}")
    if not is_given:
        return f"{'; '.join(found)}; the server gives clients no handle that could grow old"
    first, later = (target.prompt(target.prompt_tokens) for _ in range(2))
    handle = await _given(target, first)
    await _judged(target, "a handle used once", first, handle)
    found.append(f"used up: {await _judged(target, 'a handle used twice', later, handle)}")
    handle = await _given(target, first)
    for _ in range(2 * NUM_MIXED):
        await _handle(target, target.prompt(target.prompt_tokens))
    later = target.prompt(target.prompt_tokens)
    found.append(f"blocks used again: {await _judged(target, 'an old handle', later, handle)}")
    handle = await _given(target, first)
    await asyncio.sleep(target.lease_s)
    later = target.prompt(target.prompt_tokens)
    found.append(f"expired: {await _judged(target, 'an expired handle', later, handle)}")
    return "; ".join(found)


_MADE_UP: dict[str, Any] = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "forged",
    "remote_request_id": "forged", "remote_block_ids": [1, 2, 3, 4], "remote_host": "127.0.0.1",
    "remote_port": 9, "tp_size": 1,
}  # fmt: skip


def _far(ids: Any) -> Any:
    return [_far(each) for each in ids] if isinstance(ids, list) else FAR


_FORGED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "unknown request": lambda handle: handle | {"remote_request_id": "forged"},
    "blocks out of range": lambda handle: (
        handle | {"remote_block_ids": _far(handle.get("remote_block_ids") or [1])}
    ),
}


async def _handle(target: Target, prompt: list[int]) -> dict[str, Any] | None:
    """Let the prefill worker compute a prompt. Return the handle with which decode would take its
    KV, or None when the server gives no handle.
    """
    wanted = {HANDLE: {"do_remote_decode": True, "do_remote_prefill": False}, "stream": False}
    answer = await (target.prefill or target.main).complete(prompt, 1, None, **wanted)
    return answer.document.get(HANDLE)


async def _given(target: Target, prompt: list[int]) -> dict[str, Any]:
    handle = await _handle(target, prompt)
    if handle is None:
        raise Failed(f"the prefill worker gives a handle for some prompts only (no {HANDLE})")
    return handle


async def _judged(target: Target, what: str, prompt: list[int], handle: dict[str, Any]) -> str:
    """Ask with a handle and compare with the answer without one. Raises Failed when they differ."""
    try:
        async with asyncio.timeout(target.deadline_s):
            found = await target.main.complete(
                prompt, PROBE_TOKENS, None, **{"stream": False, HANDLE: handle}
            )
    except TimeoutError:
        raise Failed(f"{what}: no end within {target.deadline_s:g} s") from None
    clean = await target.whole(prompt, PROBE_TOKENS, cache_salt=f"s{target.draw.random()}")
    if found.error:  # and the server lives on, as the clean answer shows
        return "refused"
    _same(clean, found, f"{what}: status 200")
    return "computed anew"


# ---------------------------------------------------------------- ends and refusals


async def one_end_each(target: Target) -> str:
    """Requests of all sizes are sent at once. Each ends once, in time, with as many tokens as it
    asked for.
    """
    asked = [
        (target.draw.randrange(1, target.prompt_tokens), target.draw.randrange(1, 64))
        for _ in range(NUM_MIXED)
    ]
    begun = time.monotonic()
    answers = await asyncio.gather(
        *(target.whole(target.prompt(length), count) for length, count in asked)
    )
    for (length, count), answer in zip(asked, answers, strict=True):
        number = len(answer.ids) or (answer.document.get("usage") or {}).get("completion_tokens")
        if number != count:
            raise Failed(f"{count} tokens after {length} were asked for and {number} came")
    return f"{len(asked)} requests at once ended within {time.monotonic() - begun:.1f} s"


async def refusals(target: Target) -> str:
    """The server refuses what it cannot serve with a 4xx and a message in JSON."""
    base = {"model": target.main.model, "prompt": [65], "max_tokens": 1}
    bodies = {
        "no JSON": b"{",
        "no prompt": msgspec.json.encode({"model": target.main.model}),
        "another model": msgspec.json.encode(base | {"model": "no-such-model"}),
        "max_tokens of -1": msgspec.json.encode(base | {"max_tokens": -1}),
        "a temperature in words": msgspec.json.encode(base | {"temperature": "hot"}),
        "a token that is none": msgspec.json.encode(base | {"prompt": [-5]}),
        "a prompt beyond any context": msgspec.json.encode(base | {"prompt": [65] * 2_000_000}),
    }
    for what, body in bodies.items():
        status, said = await _refused(target, what, body)
        if not 400 <= status < 500:
            raise Failed(f"{what}: status {status}")
        if not _message(said):
            raise Failed(f"{what}: status {status} without a message in JSON: {said[:80]!r}")
    return f"{', '.join(bodies)}: 4xx, each with a message in JSON"


async def _refused(target: Target, what: str, body: bytes) -> tuple[int, bytes]:
    said = bytearray()
    try:
        async with asyncio.timeout(target.deadline_s):
            status = await target.main.post(COMPLETIONS, body, lambda data, _: said.extend(data))
    except (RequestFailed, TimeoutError) as error:
        raise Failed(f"{what}: no answer ({error or 'too late'})") from None
    return status, bytes(said)


def _message(body: bytes) -> str:
    try:
        document = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return ""
    error = document.get("error", document) if isinstance(document, dict) else {}
    found = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return str(found or "")


# ---------------------------------------------------------------- beside another server


async def same_answers(target: Target) -> str:
    """Two servers with the same weights and different shapes give the same answers."""
    if target.other is None:
        raise NotPossible("`other-url` has to name a server of the same weights in another shape")
    lengths = sorted({1, 31, 64, target.prompt_tokens // 2, target.prompt_tokens})
    for length in lengths:
        prompt = target.prompt(length)
        wanted, found = await target.whole_of_other(prompt), await target.whole(prompt)
        _same(wanted, found, f"a prompt of {length} tokens")
    return f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]} tokens: the same answers"


async def short_prompts(target: Target) -> str:
    """Short prompts take at most 1 / 0.85 of the time that a server takes which is not
    disaggregated.
    """
    if target.other is None:
        raise NotPossible("`other-url` has to name a server that is not disaggregated")
    ours: list[float] = []
    others: list[float] = []
    for turn in range(SHORT_ROUNDS + 1):
        prompts = [target.prompt(SHORT_TOKENS) for _ in range(ABORTS_AT_ONCE)]
        for asked, seconds in ((target.whole, ours), (target.whole_of_other, others)):
            begun = time.monotonic()
            await asyncio.gather(*(asked(prompt, SHORT_OUTPUTS) for prompt in prompts))
            if turn:  # the first one warms both
                seconds.append(time.monotonic() - begun)
    ratio = sum(others) / sum(ours)
    told = (
        f"{ratio:.2f} times the speed of the other server, over {SHORT_ROUNDS} turns of "
        f"{ABORTS_AT_ONCE} prompts of {SHORT_TOKENS} tokens with {SHORT_OUTPUTS} each"
    )
    if ratio < LEAST_RATIO:
        raise Failed(f"{told}; wanted: {LEAST_RATIO}")
    return told


async def transport(target: Target) -> str:
    """An operator can see which transport moves KV."""
    workers = (await target.main.status()).get("workers") or []
    urls = [str(worker["health_url"]) for worker in workers if worker.get("health_url")]
    if not urls:
        raise NotPossible("no worker has a `health-port`, where bytes are counted by transport")
    await target.whole(target.prompt(target.prompt_tokens), 1)
    moved: dict[str, float] = {}
    for url in urls:
        for name, labels, value in parse_metrics(
            (await target.main.get("/metrics", url=url)).decode()
        ):
            if name == "mooncake_transfer_bytes_total":
                moved[labels["protocol"]] = moved.get(labels["protocol"], 0.0) + value
    if not any(moved.values()):
        raise Failed("mooncake_transfer_bytes_total has no bytes after a prompt was handed over")
    return ", ".join(f"{protocol}: {count:.0f} bytes" for protocol, count in moved.items())
