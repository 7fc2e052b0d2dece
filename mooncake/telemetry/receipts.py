"""Receipts: the lifetime events of the last calls, from which a receipt is made when one is asked
for.

Owns what is kept of each call, within bounds of number and bytes: beyond these, the tenant that has
most loses its oldest. Events are kept as they come; nothing is computed for a call that nobody asks
about. No text of a prompt or an answer.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mooncake.base import Clock
from mooncake.telemetry.events import (
    Accepted,
    AnyEvent,
    Finished,
    FirstToken,
    Placed,
    Refused,
    RequestEvent,
    Requeued,
    Tokens,
    Worked,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from mooncake.telemetry.receipt import (
    Attempt,
    Bundle,
    BundleEntry,
    Choice,
    PlacementFacts,
    Receipt,
    SequenceReceipt,
    Step,
)
from mooncake.telemetry.traces import MAX_PLACEMENTS, SequenceTrace, Span, WorkerClocks

MAX_BYTES = 32 << 20
"""The memory that the receipts of a gateway take together, roughly."""
MAX_SEQUENCES = 16
"""Sequences of a call that are kept; further ones are only counted."""
MAX_EVENTS = 64
"""Events of a sequence that are kept, beside its end. More are kept of one placed many times."""
MAX_CHOICES = 16
"""Placements of a call of which the estimates are shown: each takes time to compute."""
CALL_BYTES = 1_000
EVENT_BYTES = 500
SPAN_BYTES = 700
MOMENT_BYTES = 300
CHOICE_BYTES = 5_000
"""Bytes that the estimates of one placement take, once somebody has asked for them."""
_PREFIX = "mooncake."


class _Sequence:
    __slots__ = (
        "events", "first_s", "last_s", "longest_gap_s", "num_left_out", "num_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.events: list[RequestEvent] = []
        self.num_left_out = 0
        self.num_tokens = 0
        self.first_s: float | None = None
        self.last_s = 0.0
        self.longest_gap_s: float | None = None

    def on_tokens(self, event: Tokens) -> None:
        """Count tokens that went to the client."""
        self.num_tokens += event.num_tokens
        if self.first_s is None:
            self.first_s = event.at_s
        else:
            gap_s = event.at_s - self.last_s
            if self.longest_gap_s is None or gap_s > self.longest_gap_s:
                self.longest_gap_s = gap_s
        self.last_s = event.at_s

    @property
    def mean_gap_s(self) -> float | None:
        """The mean time of a token after the first; None before the second."""
        if self.first_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)

    def take(self, event: RequestEvent) -> int:
        """Keep an event; return about how many bytes that takes."""
        is_end = isinstance(event, Finished | Refused | FirstToken)
        if len(self.events) >= MAX_EVENTS and not is_end:
            self.num_left_out += 1
            return 0
        self.events.append(event)
        if isinstance(event, Placed | Refused) and event.facts is not None:
            return EVENT_BYTES + event.facts.num_bytes
        if isinstance(event, Worked):
            num_moments = sum(len(span.events) for span in event.spans)
            return EVENT_BYTES + SPAN_BYTES * len(event.spans) + MOMENT_BYTES * num_moments
        return EVENT_BYTES


@dataclass(slots=True, eq=False)
class Kept:
    id: str
    call_id: str
    tenant: str
    begun_s: float
    begun_at: int
    """The same as a Unix time."""
    num_sequences: int
    sequences: dict[str, _Sequence]
    num_bytes: int = 0
    choices: dict[tuple[str, int], Choice] | None = None
    """(request, attempt) -> what was chosen from. None: not computed yet."""
    num_counted_choices: int = 0
    """How many of these `num_bytes` has."""

    def is_named(self, name: str) -> bool:
        """Whether this is the call with a receipt, an answer or a sequence of this name."""
        return name == self.call_id or self.has_own(name)

    def has_own(self, name: str) -> bool:
        """Whether this is the call with a receipt or a sequence of this name, which the gateway
        has made.
        """
        return name == self.id or name in self.sequences

    def chosen(self) -> Iterator[tuple[str, int, PlacementFacts]]:
        """Yield request, attempt and facts of the placements of all sequences, the first of each
        first; attempt 0: it was refused.
        """
        found = [list(_chosen(sequence)) for sequence in self.sequences.values()]
        for number in range(max(map(len, found), default=0)):
            yield from (each[number] for each in found if number < len(each))


class Receipts:
    """A recorder that keeps the events of the last calls. All but `weigh` is for one thread."""

    def __init__(
        self, max_receipts: int, clock: Clock, gateway: str = "", *, max_bytes: int = MAX_BYTES
    ) -> None:
        """`clock` is that of the events. `gateway`: whose receipts they are."""
        assert max_receipts > 0, "no receipts are no `Receipts`"
        self._max_receipts = max_receipts
        self._max_bytes = max_bytes
        self._clock = clock
        self.gateway = gateway
        self._calls: dict[str, OrderedDict[str, Kept]] = {}
        """Tenant -> its receipts by id, the oldest first. A dict would look for its oldest receipt
        among all that it has dropped.
        """
        self._bytes: dict[str, int] = {}
        """Tenant -> what these hold."""
        self._num_calls = self._num_bytes = 0
        self._live: dict[str, tuple[Kept, _Sequence]] = {}
        """The sequences that have not ended."""
        self._clocks = WorkerClocks()
        self._weighing = threading.Lock()

    def __len__(self) -> int:
        return self._num_calls

    def open(
        self, name: str, call_id: str, tenant: str, request_ids: Sequence[str], begun_at: int
    ) -> bool:
        """Keep the events of these sequences, the first `MAX_SEQUENCES`, under `name`; return
        whether these are all. `begun_at`: now, as a Unix time.
        """
        shown = request_ids[:MAX_SEQUENCES]
        now = self._clock.now()
        kept = Kept(
            id=name,
            call_id=call_id,
            tenant=tenant,
            begun_s=now,
            begun_at=begun_at,
            num_sequences=len(request_ids),
            sequences={request_id: _Sequence() for request_id in shown},
        )
        for request_id, sequence in kept.sequences.items():
            self._live[request_id] = kept, sequence
        self._drop(self._known(tenant, name))
        self._calls.setdefault(tenant, OrderedDict())[name] = kept
        self._num_calls += 1
        self._hold(kept, CALL_BYTES * (1 + len(shown)))
        self._make_room()
        return len(shown) == len(request_ids)

    def record(self, event: AnyEvent) -> None:
        """Take `event`; those of other requests are ignored."""
        match event:
            case RequestEvent():
                known = self._live.get(event.request_id)
                if known is None:
                    return
                kept, sequence = known
                if isinstance(event, Tokens):
                    sequence.on_tokens(event)
                    return
                self._hold(kept, sequence.take(event))
                if isinstance(event, Finished | Refused):
                    del self._live[event.request_id]
                self._make_room()
            case WorkerReported():
                self._clocks.reported(event.worker_id, event.clock_s, event.at_s)
            case WorkerJoined() | WorkerLeft():
                self._clocks.forget(event.worker_id)
            case _:
                pass

    def find(self, name: str, tenant: str | None) -> Kept | None:
        """Return the last call of a tenant (None: of any) with a receipt, an answer or a sequence
        of this name, or None if it is not here, or not here any more. Clients choose the ids of
        answers, so a receipt or a sequence of this name comes before an answer.
        """
        tenants = list(self._calls) if tenant is None else [tenant]
        found = [
            kept
            for each in tenants
            for kept in self._calls.get(each, {}).values()
            if kept.is_named(name)
        ]
        return max(found, key=lambda kept: (kept.has_own(name), kept.begun_s), default=None)

    def weigh(self, kept: Kept) -> bool:
        """Compute the estimates of the workers that one of a call's placements chose from, the
        first that has none; return whether there was one. It is slow, so call it in a thread until
        it returns False, and `receipt` then.
        """
        with self._weighing:
            known = dict(kept.choices or {})
            for request_id, attempt, facts in kept.chosen():
                name = request_id, attempt
                if name not in known and len(known) < MAX_CHOICES:
                    known[name] = facts.choice()
                    kept.choices = known
                    return True
            return False

    def receipt(self, kept: Kept) -> Receipt:
        """Return the receipt of a call, as far as it has come. Estimates that were computed for it
        count as held from now on.
        """
        if self._known(kept.tenant, kept.id) is kept:
            num_choices = len(kept.choices or ())
            self._hold(kept, CHOICE_BYTES * (num_choices - kept.num_counted_choices))
            kept.num_counted_choices = num_choices
            self._make_room()
        return Receipt(
            id=kept.id,
            call_id=kept.call_id,
            gateway=self.gateway,
            tenant=kept.tenant,
            begun_at=kept.begun_at,
            num_sequences=kept.num_sequences,
            sequences=[
                _sequence(request_id, sequence, kept, self._clocks)
                for request_id, sequence in kept.sequences.items()
            ],
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when the bounds are not kept, or the sums are wrong."""
        calls = [kept for calls in self._calls.values() for kept in calls.values()]
        assert len(calls) == self._num_calls <= self._max_receipts
        assert sum(kept.num_bytes for kept in calls) == self._num_bytes
        assert self._num_bytes <= self._max_bytes or not calls
        for tenant, own in self._calls.items():
            assert own, "a tenant without receipts was kept"
            assert self._bytes[tenant] == sum(kept.num_bytes for kept in own.values())
        assert set(self._bytes) == set(self._calls)
        known = {request_id for kept in calls for request_id in kept.sequences}
        assert set(self._live) <= known, "a sequence is followed whose receipt was dropped"

    def _known(self, tenant: str, name: str) -> Kept | None:
        own = self._calls.get(tenant)
        return None if own is None else own.get(name)

    def _hold(self, kept: Kept, num_bytes: int) -> None:
        kept.num_bytes += num_bytes
        self._num_bytes += num_bytes
        self._bytes[kept.tenant] = self._bytes.get(kept.tenant, 0) + num_bytes

    def _make_room(self) -> None:
        """Drop the oldest receipts of the tenant that has most, until the bounds are kept."""
        while self._num_calls and (
            self._num_calls > self._max_receipts or self._num_bytes > self._max_bytes
        ):
            most = max(self._bytes, key=self._bytes.__getitem__)
            self._drop(next(iter(self._calls[most].values())))

    def _drop(self, kept: Kept | None) -> None:
        if kept is None:
            return
        own = self._calls[kept.tenant]
        del own[kept.id]
        self._num_calls -= 1
        self._num_bytes -= kept.num_bytes
        self._bytes[kept.tenant] -= kept.num_bytes
        if not own:
            del self._calls[kept.tenant], self._bytes[kept.tenant]
        for request_id, sequence in kept.sequences.items():
            live = self._live.get(request_id)
            if live is not None and live[1] is sequence:
                del self._live[request_id]


def _sequence(
    request_id: str, kept: _Sequence, call: Kept, clocks: WorkerClocks
) -> SequenceReceipt:
    """Return what the events of a sequence tell."""
    root = Span("request", call.begun_s)
    trace = SequenceTrace(root, clocks)
    accepted: Accepted | None = None
    limited: Accepted | Refused | None = None
    first: FirstToken | None = None
    ended: Finished | Refused | None = None
    for event in kept.events:
        trace.take(event)
        match event:
            case Accepted():
                accepted = limited = event
            case FirstToken():
                first = event
            case Finished() | Refused():
                ended = event
                limited = event if isinstance(event, Refused) else limited
            case _:
                pass
    num_prompt = accepted.num_prompt_tokens if accepted is not None else 0
    return SequenceReceipt(
        request_id=request_id,
        state=_state(kept, ended),
        status=ended.status if ended is not None else 200,
        refused=ended.reason if isinstance(ended, Refused) else None,
        num_prompt_tokens=num_prompt,
        num_output_tokens=kept.num_tokens,
        cache=first.cache if first is not None else None,
        ttft_s=first.at_s - accepted.at_s if first is not None and accepted is not None else None,
        ttft_slo_s=limited.ttft_slo_s if limited is not None else None,
        tbt_s=kept.mean_gap_s,
        longest_gap_s=kept.longest_gap_s,
        tbt_slo_s=limited.tbt_slo_s if limited is not None else None,
        attempts=list(_attempts(kept, root, call, first)),
        choice=(call.choices or {}).get((request_id, 0)),
        steps=list(_steps(root, call.begun_s)),
        num_left_out=kept.num_left_out,
    )


def _state(kept: _Sequence, ended: Finished | Refused | None) -> str:
    if isinstance(ended, Finished):
        return ended.reason.value
    if isinstance(ended, Refused):
        return "rejected"
    if kept.num_tokens:
        return "answering"
    moves = [event for event in kept.events if isinstance(event, Placed | Requeued)]
    return "placed" if moves and isinstance(moves[-1], Placed) else "waiting"


def _attempts(
    kept: _Sequence, root: Span, call: Kept, first: FirstToken | None
) -> Iterator[Attempt]:
    spans = [span for span in root.children if span.name == "placement"]
    placed = [event for event in kept.events if isinstance(event, Placed)]
    starts = [event.at_s for event in placed]
    firsts = [number for number, at_s in enumerate(starts) if first and at_s <= first.at_s]
    for number, (event, span) in enumerate(
        zip(placed[:MAX_PLACEMENTS], spans, strict=False)  # spans are as many at most
    ):
        shows_first = bool(firsts) and number == firsts[-1]
        yield Attempt(
            number=number + 1,
            prefill=event.prefill,
            decode=event.decode,
            start_s=event.at_s - call.begun_s,
            end_s=_ended(span, call.begun_s),
            lost=span.error,
            predicted_ttft_s=event.predicted_ttft_s,
            ttft_s=first.at_s - event.at_s if first is not None and shows_first else None,
            predicted_tbt_s=event.predicted_tbt_s,
            num_predicted_cached_tokens=event.num_cached_tokens,
            num_fetch_blocks=event.num_fetch_blocks,
            choice=(call.choices or {}).get((event.request_id, number + 1)),
        )


def _steps(root: Span, begun_s: float) -> Iterator[Step]:
    """Yield the waits at the gateway and what workers did, in the order of their beginnings."""
    found: list[Step] = []
    for span in root.children:
        if span.name != "placement":
            found.append(_step(span, begun_s, None))
            continue
        number = span.attributes[f"{_PREFIX}attempt"]
        assert isinstance(number, int)
        found += [_step(child, begun_s, number) for child in span.children]
    yield from sorted(found, key=lambda step: step.start_s)


def _step(span: Span, begun_s: float, attempt: int | None) -> Step:
    facts = {
        name.removeprefix(_PREFIX): value
        for name, value in span.attributes.items()
        if not isinstance(value, list)
    }
    worker = facts.pop("worker", None)
    return Step(
        name=span.name,
        start_s=span.start_s - begun_s,
        end_s=_ended(span, begun_s),
        worker=None if worker is None else str(worker),
        attempt=attempt,
        facts=facts,
    )


def _ended(span: Span, begun_s: float) -> float | None:
    return span.end_s - begun_s if span.end_s else None


def bundle(kept: Kept) -> Bundle:
    """Return the facts of the placements of a call, as far as they were kept; slow where there are
    many workers.
    """
    placements = [
        BundleEntry(request_id=request_id, attempt=attempt, placement=facts.bundled())
        for request_id, attempt, facts in kept.chosen()
    ]
    return Bundle(receipt=kept.id, placements=placements)


def _chosen(sequence: _Sequence) -> Iterator[tuple[str, int, PlacementFacts]]:
    """Yield request, attempt and facts of one sequence's placements."""
    attempt = 0
    for event in list(sequence.events):  # in a thread: more may come meanwhile
        attempt += isinstance(event, Placed)
        if isinstance(event, Placed | Refused) and event.facts is not None:
            yield event.request_id, attempt, event.facts
