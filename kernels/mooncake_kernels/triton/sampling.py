"""Drawing tokens without sorting, and penalties (contract: `reference.sampling`).

One program a row. A row's scaled logits are at most 0, so their magnitudes' bits order them, and
the thresholds of top-k and top-p are found by narrowing an interval of bit patterns fourfold with
each pass over the row: 16 passes, all from L2, whatever k and p are. Masses are summed in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mooncake_kernels.reference.sampling import DrawSettings, Penalties
from mooncake_kernels.triton.device import pow2

_INFINITY_BITS = tl.constexpr(0x7F800000)
_BLOCK = 4096


@triton.jit
def _bits(row, first, vocab, best, temperature, BLOCK: tl.constexpr):
    """Return (magnitude bits of the scaled logits, largest for what is not there; the logits)."""
    i = first + tl.arange(0, BLOCK)
    logit = tl.load(row + i, mask=i < vocab, other=float("-inf"))
    scaled = (logit - best) / temperature
    bits = tl.abs(scaled).to(tl.int32, bitcast=True)
    return tl.where(i < vocab, bits, _INFINITY_BITS + 1), scaled


@triton.jit
def _search(row, vocab, best, temperature, floor, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest bits such that what lies strictly nearer to the best is below `wanted`.

    What lies there is counted, or its mass is summed (MASS) as far as it is not beyond `floor`.
    """
    low = tl.full([], 0, tl.int32)
    high = tl.full([], _INFINITY_BITS + 1, tl.int32)
    while high - low > 1:
        step = (high - low + 3) // 4
        one = tl.minimum(low + step, high)
        two = tl.minimum(one + step, high)
        three = tl.minimum(two + step, high)
        below_one = tl.zeros([BLOCK], tl.float64)
        below_two = tl.zeros([BLOCK], tl.float64)
        below_three = tl.zeros([BLOCK], tl.float64)
        for first in range(0, vocab, BLOCK):
            bits, scaled = _bits(row, first, vocab, best, temperature, BLOCK)
            if MASS:
                amount = tl.where(bits <= floor, tl.exp(scaled), 0.0).to(tl.float64)
            else:
                amount = tl.full([BLOCK], 1.0, tl.float64)
            below_one += tl.where(bits < one, amount, 0.0)
            below_two += tl.where(bits < two, amount, 0.0)
            below_three += tl.where(bits < three, amount, 0.0)
        start = low
        end = high
        one_fits = tl.sum(below_one, 0) < wanted
        two_fits = tl.sum(below_two, 0) < wanted
        three_fits = tl.sum(below_three, 0) < wanted
        low = tl.where(one_fits, one, start)
        low = tl.where(two_fits, two, low)
        low = tl.where(three_fits, three, low)
        high = tl.where(three_fits, end, three)
        high = tl.where(two_fits, high, two)
        high = tl.where(one_fits, high, one)
    return low


@triton.jit
def _best(row, vocab, BLOCK: tl.constexpr):
    """Return (the largest logit, the lowest id that has it)."""
    best = float("-inf")
    token = 0
    for first in range(0, vocab, BLOCK):
        i = first + tl.arange(0, BLOCK)
        logit = tl.load(row + i, mask=i < vocab, other=float("-inf"))
        largest = tl.max(logit, 0)
        if largest > best:
            best = largest
            token = first + tl.argmax(logit, 0)
    return best, token


@triton.jit
def _draw(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, tokens, stride, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = logits + place.to(tl.int64) * stride
    best, token = _best(row, vocab, BLOCK)
    temperature = tl.load(temperatures + place)
    if temperature > 0:
        # log(min p) is at most 0: its magnitude bounds the magnitudes that stay.
        floor = tl.abs(tl.load(min_ps + place)).to(tl.int32, bitcast=True)
        top_k = tl.load(top_ks + place)
        if (top_k > 0) & (top_k < vocab):
            kept = _search(row, vocab, best, temperature, floor, top_k.to(tl.float64), False, BLOCK)
            floor = tl.minimum(floor, kept)
        top_p = tl.load(top_ps + place)
        total = tl.zeros([BLOCK], tl.float64)
        for first in range(0, vocab, BLOCK):
            bits, scaled = _bits(row, first, vocab, best, temperature, BLOCK)
            total += tl.where(bits <= floor, tl.exp(scaled), 0.0).to(tl.float64)
        mass = tl.sum(total, 0)
        if top_p < 1.0:
            kept = _search(row, vocab, best, temperature, floor, top_p * mass, True, BLOCK)
            floor = tl.minimum(floor, kept)
            total = tl.zeros([BLOCK], tl.float64)
            for first in range(0, vocab, BLOCK):
                bits, scaled = _bits(row, first, vocab, best, temperature, BLOCK)
                total += tl.where(bits <= floor, tl.exp(scaled), 0.0).to(tl.float64)
            mass = tl.sum(total, 0)
        target = tl.load(uniforms + place) * mass
        token = _invert(row, vocab, best, temperature, floor, target, token, BLOCK)
    tl.store(tokens + place, token.to(tl.int64))


@triton.jit
def _invert(row, vocab, best, temperature, floor, target, token, BLOCK: tl.constexpr):
    """Return the first token whose cumulative weight exceeds target.

    Rounding may leave none: then the last token that has weight. `token` is the most likely one.
    """
    i = tl.arange(0, BLOCK)
    before = tl.full([], 0.0, tl.float64)
    found = vocab
    last = token
    for first in range(0, vocab, BLOCK):
        bits, scaled = _bits(row, first, vocab, best, temperature, BLOCK)
        weight = tl.where(bits <= floor, tl.exp(scaled), 0.0).to(tl.float64)
        cumulative = before + tl.cumsum(weight, 0)
        here = tl.min(tl.where((cumulative > target) & (weight > 0), first + i, vocab), 0)
        found = tl.minimum(found, here)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, first + i, 0), 0))
        before += tl.sum(weight, 0)
    return tl.where(found < vocab, found, last)


def draw(logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """Return one token id per row, int64 [rows]; see the reference. Reads nothing to the host."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if logits.stride(1) != 1:
        raise ValueError("a row of logits must be contiguous")
    if rows:
        block = min(_BLOCK, pow2(vocab))
        _draw[(rows,)](
            logits, settings.temperature, settings.top_k, settings.top_p,
            settings.min_p.log().float(), settings.uniform, tokens, logits.stride(0), vocab,
            BLOCK=block, num_warps=16 if block == _BLOCK else 4,
        )  # fmt: skip
    return tokens


@triton.jit
def _penalize(
    logits, seen, counts, repetitions, presences, frequencies, stride, vocab, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetitions + place)
    presence = tl.load(presences + place)
    frequency = tl.load(frequencies + place)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < vocab
    logit = tl.load(logits + place * stride + i, mask=there, other=0.0)
    was_seen = tl.load(seen + place * vocab + i, mask=there, other=0) != 0
    count = tl.load(counts + place * vocab + i, mask=there, other=0)
    repeated = tl.where(logit > 0, logit / repetition, logit * repetition)
    logit = tl.where(was_seen, repeated, logit)
    logit -= frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0)
    tl.store(logits + place * stride + i, logit, mask=there)


def penalize(
    logits: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor, penalties: Penalties
) -> None:
    """Take penalties off `logits` in place; see the reference. seen and counts contiguous."""
    rows, vocab = logits.shape
    if not rows:
        return
    block = min(_BLOCK, pow2(vocab))
    _penalize[(rows, triton.cdiv(vocab, block))](
        logits, seen.view(torch.uint8), counts,
        penalties.repetition, penalties.presence, penalties.frequency,
        logits.stride(0), vocab, BLOCK=block, num_warps=4,
    )  # fmt: skip
