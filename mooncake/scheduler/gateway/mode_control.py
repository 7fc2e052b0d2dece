"""Carries out what operators want of the whole cluster (`base.cluster_mode`): no new requests,
sleep, other weights.

Owned by the gateway machine. The wanted mode is the only state that decides: whatever a worker does
not do yet, it is told again, so that a lost message or a worker that died costs a second. Gateways
tell one another the mode; each of them carries it out, and orders that come twice change nothing.

    open ─► paused ─► requests over ─► engines asleep ─► checkpoint checked by all that have its
    files ─► then by those that read it from them ─► pools and engines come back with the new
    weights ─► open
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from mooncake.base import IdSource, InvalidRequest, MooncakeError, Role, Unavailable, WorkerRef
from mooncake.base.cluster_mode import KEPT, ClusterMode, Weights
from mooncake.base.messages import (
    Asleep,
    CheckWeights,
    Restart,
    WeightsChecked,
    Welcome,
    WorkerHello,
)
from mooncake.rpc.channel import Channel
from mooncake.scheduler.gateway.peer_gateways import PeerGateways
from mooncake.scheduler.membership_table import MembershipTable
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.scheduler.requests.request_manager import RequestManager

SAY_S = 0.5
"""Seconds between two orders of the same kind to a worker."""
GIVE_UP_S = 300.0
"""A worker that has left to sleep and shows no sign of life is not waited for after this time."""
RETRY_S = 5.0
"""The advice to a client that is refused meanwhile."""
ENGINES = frozenset((Role.PREFILL, Role.DECODE))
MOVED = frozenset((*ENGINES, Role.KVSTORE))
"""Roles whose workers come back for new weights."""

Done = Callable[[MooncakeError | None], None]
"""Called once, when an order is carried out, or with why it cannot be."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sleeping:
    asleep: Asleep
    heard_s: float


@dataclass(slots=True)
class _Update:
    """New weights that are being checked."""

    model: str
    ticket: int
    level: int
    """The level of sleep to return to."""
    done: Done
    answers: dict[WorkerRef, WeightsChecked] = field(default_factory=dict)
    revision: str = ""
    """The revision that engines with files have found."""
    lenders: list[WorkerRef] = field(default_factory=list)
    """The engines with files, once the others are asked to read the weights from them."""


class ModeControl:
    """Brings all workers into the wanted mode, and tells those who wait for it."""

    def __init__(
        self,
        own: WorkerRef,
        channel: Channel,
        membership: MembershipTable,
        conductor: Conductor,
        request_manager: RequestManager,
        peers: PeerGateways,
        ids: IdSource,
        timeout_s: float,
    ) -> None:
        """`timeout_s`: a sleeping worker that is silent for this long is forgotten."""
        self._own = own
        self._channel = channel
        self._membership = membership
        self._conductor = conductor
        self._requests = request_manager
        self._peers = peers
        self._ids = ids
        self._timeout_s = timeout_s
        self.mode = ClusterMode()
        self.on_weights: Callable[[Weights], None] = _ignore
        """Is called when other weights take the place of those that were."""
        self._weights = self.mode.weights
        """The last weights that `on_weights` was told of."""
        self._sleeping: dict[str, _Sleeping] = {}
        self._told: set[WorkerRef] = set()
        """Members that were told to come back otherwise."""
        self._away: dict[str, float] = {}
        """Workers that have left as they were told and are not back yet -> when they left."""
        self._waits: list[tuple[Callable[[], bool], Done, MooncakeError | None]] = []
        self._update: _Update | None = None
        self._next_s = float("-inf")
        self._guessed = 0
        """The number of a mode of which only a pool has told; 0: there is none."""

    # ------------------------------------------------------------ operators

    def pause(self, done: Done, *, aborts: bool) -> None:
        """Take no more requests. `done` when those that run have ended; with `aborts` they are
        ended.
        """
        self._change(paused=True, sleep_level=self.mode.sleep_level, aborts=aborts)
        self._when(self._requests_are_over, done)

    def resume(self, done: Done) -> None:
        """Take requests again. Engines that sleep go on sleeping."""
        if self._update is not None:
            done(InvalidRequest("new weights are being loaded; resume when that has ended"))
            return
        self._change(paused=False, sleep_level=self.mode.sleep_level)
        done(None)

    def sleep(self, level: int, done: Done, *, aborts: bool) -> None:
        """Let all engines sleep once the requests that run have ended. `done` when they sleep."""
        problem = self._why_not()
        if problem is not None:
            done(problem)
            return
        self._change(paused=self.mode.paused, sleep_level=level, aborts=aborts)
        self._when(self._all_sleep, done)

    def wake(self, done: Done) -> None:
        """Wake all engines. `done` when they are members again. A pause is not ended by it."""
        if self._update is not None:
            done(InvalidRequest("new weights are being loaded; wake the engines afterwards"))
            return
        self._change(paused=self.mode.paused, sleep_level=0)
        self._when(self._all_awake, done)

    def update_weights(self, model: str, done: Done) -> None:
        """Replace the weights of all engines by the checkpoint in the directory `model` of their
        machines. If any engine cannot serve it, all keep the weights that they have. Blocks cached
        under the old weights are never read again.
        """
        problem = self._why_not()
        if problem is None and self.mode.is_open:
            problem = InvalidRequest(
                "pause the cluster first (POST /pause), so that no request runs with both weights"
            )
        if problem is not None:
            done(problem)
            return
        level = self.mode.sleep_level
        self._update = _Update(model, self._ids.integer(62), level, done)
        self._change(paused=self.mode.paused, sleep_level=max(level, KEPT), aborts=self.mode.aborts)

    def _why_not(self) -> MooncakeError | None:
        """Return why engines cannot sleep now."""
        if self._update is not None:
            return InvalidRequest(f"the weights in {self._update.model} are being loaded")
        hellos = [member.hello for member in self._membership.members]
        engines = [hello for hello in hellos if hello.role in ENGINES]
        shared = [hello.worker.worker_id for hello in engines if hello.expert_group]
        if shared:
            return InvalidRequest(
                f"{shared[0]} shares its experts with other workers, and those cannot sleep: "
                "start the cluster again, with the weights that it is to serve"
            )
        if not self._sleeping and not engines:
            return Unavailable("no engine is here", retry_after_s=RETRY_S)
        return None

    @property
    def waits_for(self) -> str:
        """What an order that is not carried out yet waits for."""
        if not self._requests_are_over():
            return "requests still run"
        names = [*self._away, *(hello.worker.worker_id for hello in self._differing())]
        if self._update is not None:
            answered = {each.worker_id for each in self._update.answers}
            names += [name for name in self._sleeping if name not in answered]
        elif not self.mode.sleep_level:
            names += self._sleeping
        return f"{', '.join(dict.fromkeys(names)) or 'nobody'} is not ready"

    # ------------------------------------------------------------ gateways and workers

    def learn(self, mode: ClusterMode) -> None:
        """Take the mode that another process has heard of."""
        self._take(self.mode.merged(mode))

    def on_hello(self, hello: WorkerHello, now: float) -> bool:
        """Return whether a worker can join as it is. If not, it is told how to come back.

        A gateway that has just started learns the weights from the worker. It does not learn a
        pause, which the worker may not know to be over. It learns nothing from a pool client, which
        may belong to a tenant.
        """
        if hello.role not in MOVED:
            return True
        known, theirs = self.mode, hello.mode
        weights = known.merged(theirs).weights
        self._take(msgspec.structs.replace(known, weights=weights))
        if theirs.number > known.number:
            if self._peers.live:
                return True  # their news are on the way
            self._take(ClusterMode(theirs.number, self._own.worker_id, weights=weights))
            self._guessed = theirs.number
        if hello.role in ENGINES:
            self._guessed = 0
        if not self._differs(hello):
            self._away.pop(hello.worker.worker_id, None)
            return True
        self._tell(hello.worker)
        self._away[hello.worker.worker_id] = now
        return False

    def on_asleep(self, asleep: Asleep, now: float) -> None:
        """Record that an engine sleeps. The engine knows better than a pool, which does not hear
        that engines sleep.
        """
        theirs = asleep.mode
        if theirs.number < self.mode.number == self._guessed:
            theirs = msgspec.structs.replace(theirs, number=self._guessed, by=self.mode.by)
            self._take(theirs.merged(self.mode))
        self.learn(theirs)
        worker_id = asleep.worker.worker_id
        if worker_id not in self._sleeping:
            logger.info("worker %s sleeps at level %d", worker_id, asleep.level)
        self._sleeping[worker_id] = _Sleeping(asleep, now)
        self._away.pop(worker_id, None)
        welcome = Welcome(
            gateway=self._own, kvstore=None, send_snapshot=False, gateways=self._peers.live
        )
        self._channel.send(asleep.worker.address, welcome)

    def on_left(self, worker: WorkerRef, now: float) -> None:
        """Record that a worker has left in good order; if it was told to, it comes back."""
        if worker in self._told:
            self._told.discard(worker)
            self._away[worker.worker_id] = now

    def on_lost(self, worker_id: str) -> None:
        """Record that a worker is gone, or was started again."""
        self._sleeping.pop(worker_id, None)
        self._away.pop(worker_id, None)

    def on_checked(self, answer: WeightsChecked) -> None:
        """Take what an engine has found out about a checkpoint."""
        update = self._update
        if update is not None and answer.asker == self._own and answer.ticket == update.ticket:
            update.answers[answer.worker] = answer

    @property
    def asleep(self) -> list[Asleep]:
        """The engines that sleep, in the order in which they fell asleep."""
        return [each.asleep for each in self._sleeping.values()]

    # ------------------------------------------------------------ machine

    def tick(self, now: float) -> float | None:
        """Tell workers what to do, and whoever waits that it is done. Returns when to call
        again.
        """
        if self.mode.weights != self._weights:
            self._weights = self.mode.weights
            self.on_weights(self._weights)
        if not self.mode.is_open and self.mode.aborts and len(self._requests):
            self._requests.end_all(now)
        if now >= self._next_s:
            self._next_s = now + SAY_S
            self._forget_silent(now)
            self._tell_all(now)
        self._check_update(now)
        due = [wait for wait in self._waits if wait[0]()]
        self._waits = [wait for wait in self._waits if wait not in due]
        for _, done, error in due:
            done(error)
        busy = self._sleeping or self._away or self._waits or self._update or self._told
        return self._next_s if busy or not self.mode.is_open else None

    def _tell_all(self, now: float) -> None:
        """Tell each worker that is not as it should be how to come back: members once no request
        runs, and engines that sleep at once. No engine is woken while a worker is a member with
        other weights: gateways would refuse it.
        """
        for hello in self._differing() if self._requests_are_over() else ():
            self._conductor.on_draining(hello.worker.worker_id)
            self._tell(hello.worker)
            self._told.add(hello.worker)
        if self._update is not None and self._all_sleep():
            self._ask(self._update)
        for worker_id, sleeping in list(self._sleeping.items()):
            asleep = sleeping.asleep
            wakes = not self.mode.sleep_level and not self._differing()
            if wakes or asleep.mode.sleep_level < self.mode.sleep_level:
                self._tell(asleep.worker)
                del self._sleeping[worker_id]  # it says so if it has not heard
                self._away[worker_id] = now

    def _ask(self, update: _Update) -> None:
        for sleeping in self._sleeping.values():
            worker = sleeping.asleep.worker
            if worker not in update.answers:
                question = CheckWeights(
                    asker=self._own, ticket=update.ticket, model=update.model,
                    revision=update.revision, lenders=update.lenders,
                )  # fmt: skip
                self._channel.send(worker.address, question)

    def _check_update(self, now: float) -> None:
        """Decide about new weights once all engines have answered. Those that have no files of them
        are asked again, to read them from the others. Another gateway may have woken them before
        that.
        """
        update = self._update
        if update is not None and not self.mode.sleep_level:
            self._update = None
            text = "another order has woken the engines before all had checked the new weights"
            update.done(Unavailable(f"{text}: give the order again", retry_after_s=RETRY_S))
            return
        if update is None or not self._all_sleep() or not self._sleeping:
            return
        answers = [update.answers.get(each.asleep.worker) for each in self._sleeping.values()]
        given = [answer for answer in answers if answer is not None]
        if len(given) < len(answers):
            return
        lacking = [answer for answer in given if answer.borrows]
        having = [answer for answer in given if not answer.borrows]
        problem = _problem(having or lacking, update.model)
        if problem is None and lacking:
            # They answer once more, by another ticket: an answer of before may be under way.
            update.ticket = self._ids.integer(62)
            update.revision = having[0].revision
            update.lenders = [answer.worker for answer in having]
            update.answers = {answer.worker: answer for answer in having}
            return
        self._update = None
        weights = self.mode.weights
        if problem is None:
            found = given[0]
            weights = Weights(weights.number + 1, update.model, found.revision, found.fingerprint)
            logger.info("the weights are now those in %s: %s", update.model, found.revision)
        self._take(msgspec.structs.replace(self.mode, weights=weights))
        self._change(paused=self.mode.paused, sleep_level=update.level, aborts=self.mode.aborts)
        if problem is not None and update.level:
            self._forget_checked(now)
        back = self._all_sleep if update.level else self._all_awake
        self._when(back, update.done, problem)

    def _forget_checked(self, now: float) -> None:
        """Have engines that sleep on begin to sleep anew: what they have checked, and lend, is let
        go of.
        """
        for worker_id, sleeping in self._sleeping.items():
            self._tell(sleeping.asleep.worker)
            self._away[worker_id] = now
        self._sleeping.clear()

    # ------------------------------------------------------------ what holds

    def _differing(self) -> list[WorkerHello]:
        """Return the members that have to come back otherwise."""
        hellos = [member.hello for member in self._membership.members]
        return [hello for hello in hellos if self._differs(hello)]

    def _differs(self, hello: WorkerHello) -> bool:
        old = hello.mode.weights != self.mode.weights  # of two with one number, one counts
        sleeps = bool(self.mode.sleep_level) and hello.role in ENGINES
        return hello.role in MOVED and (old or sleeps)

    def _requests_are_over(self) -> bool:
        """Return whether no request of any gateway runs, as far as is known here."""
        return not len(self._requests) and self._conductor.bookings.is_empty

    def _all_sleep(self) -> bool:
        wanted = self.mode.sleep_level
        levels = (each.asleep.mode.sleep_level for each in self._sleeping.values())
        settled = not self._away and not self._differing()
        return settled and all(level >= wanted for level in levels)

    def _all_awake(self) -> bool:
        return not (self._sleeping or self._away or self._differing())

    # ------------------------------------------------------------ doing

    def _tell(self, worker: WorkerRef) -> None:
        self._channel.send(worker.address, Restart(worker=worker, mode=self.mode))

    def _when(
        self, holds: Callable[[], bool], done: Done, error: MooncakeError | None = None
    ) -> None:
        self._waits.append((holds, done, error))

    def _change(self, *, paused: bool, sleep_level: int, aborts: bool = False) -> None:
        mode = self.mode.changed(
            self._own.worker_id, paused=paused, sleep_level=sleep_level, aborts=aborts
        )
        self._take(mode)
        logger.info(
            "requests are %s, engines %s", "taken" if self.mode.is_open else "not taken",
            f"sleep at level {sleep_level}" if sleep_level else "are awake",
        )  # fmt: skip
        self._next_s = float("-inf")

    def _take(self, mode: ClusterMode) -> None:
        if mode.weights != self.mode.weights:
            self._conductor.use_fingerprint(mode.weights.fingerprint)
        self.mode = mode

    def _forget_silent(self, now: float) -> None:
        for worker_id, sleeping in list(self._sleeping.items()):
            if now - sleeping.heard_s > self._timeout_s:
                logger.warning("worker %s is lost: it slept and gave no sign of life", worker_id)
                del self._sleeping[worker_id]
        for worker_id, since_s in list(self._away.items()):
            if self.mode.sleep_level and now - since_s > GIVE_UP_S:
                logger.warning(
                    "worker %s left to sleep and has not come back: it is lost", worker_id
                )
                del self._away[worker_id]
        self._told = {worker for worker in self._told if self._membership.is_live(worker)}


def _ignore(_: Weights) -> None:
    pass


def _problem(answers: list[WeightsChecked], model: str) -> MooncakeError | None:
    """Return why the cluster cannot serve a checkpoint that all engines have looked at."""
    wrong = [answer for answer in answers if answer.error]
    if wrong:
        return InvalidRequest(f"{wrong[0].worker.worker_id}: {wrong[0].error}", param="model")
    one, *others = answers
    for other in others:
        if (other.revision, other.fingerprint) != (one.revision, one.fingerprint):
            return InvalidRequest(
                f"{model} holds revision {one.revision} for {one.worker.worker_id} and "
                f"{other.revision} for {other.worker.worker_id}: all machines must see the same "
                "files",
                param="model",
            )
    return None
