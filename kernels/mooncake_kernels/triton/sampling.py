"""Draws tokens without sorting, and applies penalties (contract: `reference.sampling`).

There is one program per row. A row's scaled logits are at most 0, so the bits of their magnitudes
order them. The thresholds of top-k and top-p are found by narrowing an interval of bit patterns to
a quarter with each pass over the row. As soon as the interval holds no more tokens than a block,
these are gathered and the search ends in registers. Masses are summed in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mooncake_kernels.reference.sampling import DrawSettings, Penalties
from mooncake_kernels.triton.device import pow2

_INFINITY_BITS = tl.constexpr(0x7F800000)
_TWO_BITS = tl.constexpr(0x40000000)
_SIXTEEN_BITS = tl.constexpr(0x41800000)
_BLOCK = 2048


@triton.jit
def _bits(row, first, vocab, best, temperature, floor, BLOCK: tl.constexpr):
    """Return (magnitude bits of the scaled logits, larger than any for tokens that do not exist or
    are beyond `floor`; the scaled logits).
    """
    i = first + tl.arange(0, BLOCK)
    logit = tl.load(row + i, mask=i < vocab, other=float("-inf"))
    scaled = (logit - best) / temperature
    bits = tl.abs(scaled).to(tl.int32, bitcast=True)
    return tl.where((i < vocab) & (bits <= floor), bits, _INFINITY_BITS + 1), scaled


@triton.jit
def _amount(bits, scaled, wanted):
    """Return what a token counts for: its mass if masses are wanted (float64), otherwise 1."""
    if wanted.dtype == tl.float64:
        amount = tl.exp(scaled).to(tl.float64)
    else:
        amount = tl.full(bits.shape, 1, tl.int32)
    return amount


@triton.jit
def _pivots(low, high):
    step = (high - low + 3) // 4
    one = tl.minimum(low + step, high)
    two = tl.minimum(one + step, high)
    return one, two, tl.minimum(two + step, high)


@triton.jit
def _narrow(low, high, low_sum, low_count, high_count, pivot, pivot_sum, pivot_count, wanted):
    """Return the interval cut at `pivot`, with the amounts below its ends."""
    fits = (pivot_sum < wanted) & (pivot > low)
    fails = (pivot_sum >= wanted) & (pivot < high)
    low_sum = tl.where(fits, pivot_sum, low_sum)
    low_count = tl.where(fits, pivot_count, low_count)
    high_count = tl.where(fails, pivot_count, high_count)
    return tl.where(fits, pivot, low), tl.where(fails, pivot, high), low_sum, low_count, high_count


@triton.jit
def _search(row, gathered, vocab, best, temperature, floor, wanted, BLOCK: tl.constexpr):
    """Return the largest bits such that the amount strictly nearer to the best is below `wanted`.

    Tokens within `floor` are counted if `wanted` is int32; if it is float64, their masses are
    summed. gathered: room for BLOCK int32.
    """
    low = tl.full([], 0, tl.int32)
    high = tl.full([], _INFINITY_BITS + 1, tl.int32)
    low_sum = wanted * 0
    low_count = tl.full([], 0, tl.int32)
    high_count = tl.full([], 0, tl.int32) + vocab
    # The range of logit thresholds. Masked tokens are at infinity.
    one = tl.full([], _TWO_BITS, tl.int32)
    two = tl.full([], _SIXTEEN_BITS, tl.int32)
    three = tl.full([], _INFINITY_BITS, tl.int32)
    while (high - low > 1) & (high_count - low_count > BLOCK):
        sum_one = tl.zeros([BLOCK], wanted.dtype)
        sum_two = tl.zeros([BLOCK], wanted.dtype)
        sum_three = tl.zeros([BLOCK], wanted.dtype)
        count_one = tl.zeros([BLOCK], tl.int32)
        count_two = tl.zeros([BLOCK], tl.int32)
        count_three = tl.zeros([BLOCK], tl.int32)
        for first in range(0, vocab, BLOCK):
            bits, scaled = _bits(row, first, vocab, best, temperature, floor, BLOCK)
            amount = _amount(bits, scaled, wanted)
            sum_one += tl.where(bits < one, amount, 0)
            sum_two += tl.where(bits < two, amount, 0)
            sum_three += tl.where(bits < three, amount, 0)
            count_one += (bits < one).to(tl.int32)
            count_two += (bits < two).to(tl.int32)
            count_three += (bits < three).to(tl.int32)
        low, high, low_sum, low_count, high_count = _narrow(
            low, high, low_sum, low_count, high_count,
            one, tl.sum(sum_one, 0), tl.sum(count_one, 0), wanted,
        )  # fmt: skip
        low, high, low_sum, low_count, high_count = _narrow(
            low, high, low_sum, low_count, high_count,
            two, tl.sum(sum_two, 0), tl.sum(count_two, 0), wanted,
        )  # fmt: skip
        low, high, low_sum, low_count, high_count = _narrow(
            low, high, low_sum, low_count, high_count,
            three, tl.sum(sum_three, 0), tl.sum(count_three, 0), wanted,
        )  # fmt: skip
        one, two, three = _pivots(low, high)
    if high - low > 1:
        bits = _gather(row, gathered, vocab, best, temperature, floor, low, high, BLOCK)
        magnitude = tl.minimum(bits, _INFINITY_BITS).to(tl.float32, bitcast=True)
        amount = _amount(bits, -magnitude, wanted)
        before = low_sum
        while high - low > 1:
            one, two, three = _pivots(low, high)
            one_fits = before + tl.sum(tl.where(bits < one, amount, 0), 0) < wanted
            two_fits = before + tl.sum(tl.where(bits < two, amount, 0), 0) < wanted
            three_fits = before + tl.sum(tl.where(bits < three, amount, 0), 0) < wanted
            from_two = tl.where(two_fits, tl.where(three_fits, three, two), one)
            to_three = tl.where(two_fits, tl.where(three_fits, high, three), two)
            low = tl.where(one_fits, from_two, low)
            high = tl.where(one_fits, to_three, one)
    return low


@triton.jit
def _gather(row, gathered, vocab, best, temperature, floor, low, high, BLOCK: tl.constexpr):
    """Return the bits of all tokens from low to before high, at most BLOCK of them; after them
    bits larger than any.
    """
    count = tl.full([], 0, tl.int32)
    for first in range(0, vocab, BLOCK):
        bits, _ = _bits(row, first, vocab, best, temperature, floor, BLOCK)
        inside = ((bits >= low) & (bits < high)).to(tl.int32)
        if tl.sum(inside, 0) > 0:
            place = count + tl.cumsum(inside, 0) - 1
            tl.store(gathered + place, bits, mask=inside != 0)
            count += tl.sum(inside, 0)
    tl.debug_barrier()  # what one thread has stored is loaded by others
    i = tl.arange(0, BLOCK)
    return tl.load(gathered + i, mask=i < count, other=_INFINITY_BITS + 1)


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
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, tokens, gathered, stride, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = logits + place.to(tl.int64) * stride
    gathered += place * BLOCK
    best, token = _best(row, vocab, BLOCK)
    temperature = tl.load(temperatures + place)
    if temperature > 0:
        # log(min p) is at most 0: its magnitude bounds the magnitudes that stay.
        floor = tl.abs(tl.load(min_ps + place)).to(tl.int32, bitcast=True)
        top_k = tl.load(top_ks + place)
        if (top_k > 0) & (top_k < vocab):
            kept = _search(row, gathered, vocab, best, temperature, floor, top_k, BLOCK)
            floor = tl.minimum(floor, kept)
        top_p = tl.load(top_ps + place)
        total = tl.zeros([BLOCK], tl.float64)
        for first in range(0, vocab, BLOCK):
            bits, scaled = _bits(row, first, vocab, best, temperature, floor, BLOCK)
            total += tl.where(bits <= floor, tl.exp(scaled), 0.0).to(tl.float64)
        mass = tl.sum(total, 0)
        if top_p < 1.0:
            tl.debug_barrier()  # nobody reads what top-k has gathered any more
            kept = _search(row, gathered, vocab, best, temperature, floor, top_p * mass, BLOCK)
            floor = tl.minimum(floor, kept)
            total = tl.zeros([BLOCK], tl.float64)
            for first in range(0, vocab, BLOCK):
                bits, scaled = _bits(row, first, vocab, best, temperature, floor, BLOCK)
                total += tl.where(bits <= floor, tl.exp(scaled), 0.0).to(tl.float64)
            mass = tl.sum(total, 0)
        target = tl.load(uniforms + place) * mass
        token = _invert(row, vocab, best, temperature, floor, target, token, BLOCK)
    tl.store(tokens + place, token.to(tl.int64))


@triton.jit
def _invert(row, vocab, best, temperature, floor, target, token, BLOCK: tl.constexpr):
    """Return the first token whose cumulative weight exceeds target.

    Rounding may leave none; then return the last token that has weight. `token` is the most likely
    one.
    """
    i = tl.arange(0, BLOCK)
    before = tl.full([], 0.0, tl.float64)
    found = vocab
    last = token
    for first in range(0, vocab, BLOCK):
        bits, scaled = _bits(row, first, vocab, best, temperature, floor, BLOCK)
        weight = tl.where(bits <= floor, tl.exp(scaled), 0.0).to(tl.float64)
        cumulative = before + tl.cumsum(weight, 0)
        here = tl.min(tl.where((cumulative > target) & (weight > 0), first + i, vocab), 0)
        found = tl.minimum(found, here)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, first + i, 0), 0))
        before += tl.sum(weight, 0)
    return tl.where(found < vocab, found, last)


def draw(logits: torch.Tensor, settings: DrawSettings) -> torch.Tensor:
    """Return one token id per row, int64 [rows]; see the reference. The host reads nothing."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if logits.stride(1) != 1:
        raise ValueError("a row of logits must be contiguous")
    if rows:
        block = min(_BLOCK, pow2(vocab))
        gathered = torch.empty(rows, block, dtype=torch.int32, device=logits.device)
        _draw[(rows,)](
            logits, settings.temperature, settings.top_k, settings.top_p,
            settings.min_p.log().float(), settings.uniform, tokens, gathered, logits.stride(0),
            vocab,
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
    """Apply penalties to `logits` in place; see the reference. seen and counts are contiguous."""
    rows, vocab = logits.shape
    if not rows:
        return
    block = min(_BLOCK, pow2(vocab))
    _penalize[(rows, triton.cdiv(vocab, block))](
        logits, seen.view(torch.uint8), counts,
        penalties.repetition, penalties.presence, penalties.frequency,
        logits.stride(0), vocab, BLOCK=block, num_warps=4,
    )  # fmt: skip
