"""Runs the batches whose lease this gateway holds, in its event loop: checks inputs, asks lines as
the window allows, records each result once, writes the files.

It owns the tasks and the window. What must survive is in the store before anything depends on it:
a line without a recorded result is asked again, by this gateway or another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import Any, TypeVar

from mooncake.api.api_server import ApiServer
from mooncake.api.batches import lines, store
from mooncake.api.batches.file_area import FileArea, LineReader
from mooncake.api.batches.in_process import Reply
from mooncake.api.batches.lines import InputChecker, InputLine, Result
from mooncake.api.batches.store import BatchRow, BatchStore, FileRow
from mooncake.api.batches.window import Window
from mooncake.api.http.access import OwnCall
from mooncake.api.lane import Lane
from mooncake.api.schema.batches import BatchError
from mooncake.base import InternalError, MooncakeError

_log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between two looks at the store: leases are renewed, new batches and cancellations are
seen. The gateway's own clients are noticed at once.
"""
LEASE_S = 20.0
"""After this long without a sign of its gateway, another one takes a batch."""
MAX_OWNED = 64
"""Batches that one gateway runs at a time."""
SWEEP_LOOKS = 60
"""Looks between two sweeps."""
ROOM_S = 0.25
"""Seconds between two tries to place a line while there is no room."""
RETRY_S = 5.0
SLICE_BYTES = 1 << 20
"""Bytes of an input file, or of results, that one piece of work handles."""
BYTES_HERE = 1 << 16
"""The longest line that is read in the event loop: less than a millisecond."""
RESULTS_AT_ONCE = 256
MAX_FAILURES = 3
"""Answers of status 500 or above, other than 503, after which the last one is the result."""
RETRIED = frozenset({401, 408, 429, 503})
"""Statuses that say "not now": 401 is a key that is gone, which an operator may bring back."""

RUNNER = "batches of all tenants"
"""The name under which the runner takes turns in a lane."""

_GONE = BatchError(
    code=lines.INPUT_GONE,
    message="the server no longer has the input file; upload it again, and create another batch",
    line=None,
    param=None,
)
Made = TypeVar("Made")
_Recorded = tuple[int, Result]
"""(`seq` of the batch, result)"""
Ask = Callable[[str, bytes, str, OwnCall], Awaitable[Reply]]
"""(route, body, the request's id, who asks) -> the answer."""


class _Run:
    """One batch that runs here."""

    def __init__(self, batch: BatchRow) -> None:
        self.batch = batch
        """The batch as it was when its lease was taken."""
        self.num_bytes = batch.num_bytes
        self.stopped = asyncio.Event()
        """Set once no further line is to be asked."""
        self.is_lost = False
        """True if another gateway may run it."""

    def lose(self) -> None:
        self.is_lost = True
        self.stopped.set()


class _Recorder:
    """Writes results. Those that come while others are written are written together."""

    def __init__(self, write: Callable[[list[_Recorded]], Awaitable[set[int]]]) -> None:
        self._write = write
        self._waiting: list[tuple[_Recorded, asyncio.Future[bool]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def record(self, seq: int, result: Result) -> bool:
        """Return when a result of the batch `seq` is written. The result is False if its lease was
        lost.

        Raises:
            Unavailable: it cannot be written now.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(((seq, result), done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_all())
        return await done

    async def _write_all(self) -> None:
        while self._waiting:
            taken = self._waiting[:RESULTS_AT_ONCE]
            del self._waiting[:RESULTS_AT_ONCE]
            failure: Exception | None = None
            lost = set[int]()
            try:
                lost = await self._write([each for each, _ in taken])
            except Exception as error:  # who waits must hear of it
                failure = error
            for (seq, _), done in taken:
                if done.done():  # its batch was stopped
                    continue
                if failure is not None:
                    done.set_exception(failure)
                else:
                    done.set_result(seq not in lost)

    async def close(self) -> None:
        """Wait for what is being written."""
        if self._writing is not None:
            await self._writing


class BatchRunner:
    """Runs batches until it is closed."""

    def __init__(
        self,
        api_server: ApiServer,
        batch_store: BatchStore,
        area: FileArea,
        *,
        storing: Lane,
        reading: Lane,
        ask: Ask,
        owner: str,
        wall_s: Callable[[], float],
        seen: Callable[[int, int, int], None],
    ) -> None:
        """`storing` is the lane of the store's one thread, `reading` that of the area's threads.
        `owner` names this life of the gateway. `seen` is told at each look how many batches run
        here, how many of their lines are being asked, and how many have no result.
        """
        self._api_server = api_server
        self._store = batch_store
        self._area = area
        self._storing = storing
        self._reading = reading
        self._ask = ask
        self._owner = owner
        self._wall_s = wall_s
        self._seen = seen
        config = api_server.config
        self._max_line_bytes = config.max_body_bytes
        self._window = Window(config.max_body_bytes)
        self._runs: dict[int, _Run] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        """The batches of one tenant are asked one after another; the first one holds its lock."""
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._recorder = _Recorder(
            lambda results: self._stored(partial(batch_store.record, owner, results))
        )

    def wake(self) -> None:
        """Look at the store at once: a client of this gateway has changed something."""
        self._wake.set()

    async def run(self) -> None:
        """Run batches until cancelled; then end what runs, and give the leases back."""
        looks = 0
        try:
            while True:
                self._wake.clear()
                try:
                    await self._look()
                    if looks % SWEEP_LOOKS == 0:
                        await self._sweep()
                except MooncakeError as error:
                    _log.error("batches cannot go on; trying again: %s", error)
                except Exception:  # the next look may find what this one did not
                    _log.exception("looking for batches failed; trying again")
                looks += 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._wake.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await self._recorder.close()
            with contextlib.suppress(MooncakeError):
                await self._stored(partial(self._store.release, self._owner))

    async def _stored(self, work: Callable[[], Made]) -> Made:
        return await self._storing.run(work, RUNNER)

    async def _read(self, work: Callable[[], Made]) -> Made:
        return await self._reading.run(work, RUNNER)

    # ------------------------------------------------------------ which batches

    async def _look(self) -> None:
        """Take leases, renew those that are held, and see what clients have asked for."""
        now = self._wall_s()
        if not self._api_server.draining:
            claim = partial(self._store.claim, self._owner, now, now + LEASE_S, MAX_OWNED)
            await self._stored(claim)
        held = await self._stored(partial(self._store.renew, self._owner, now, now + LEASE_S))
        for seq in self._runs.keys() - {row.seq for row in held}:
            self._runs[seq].lose()
        for row in held:
            if row.seq not in self._runs:
                run = self._runs[row.seq] = _Run(row)
                self._tasks[row.seq] = asyncio.create_task(self._guarded(run))
            if self._is_over(row):
                self._runs[row.seq].stopped.set()
        num_left = sum(row.num_total - row.num_completed - row.num_failed for row in held)
        self._seen(len(held), self._window.num_lines, num_left)

    def _is_over(self, row: BatchRow) -> bool:
        """Return whether no further line of the batch may be asked."""
        return row.status == store.CANCELLING or row.expires_s <= self._wall_s()

    async def _sweep(self) -> None:
        """Delete expired files and batches, and files that killed gateways have left."""
        now = self._wall_s()
        for file_id in await self._stored(partial(self._store.expire, now)):
            await self._read(partial(self._area.delete, file_id))
        known = await self._stored(self._store.file_ids)
        await self._read(partial(self._area.sweep, known, now))
        await self._purge()

    async def _purge(self) -> None:
        while await self._stored(self._store.purge):
            pass  # others have their turn at the store between two of them

    async def _guarded(self, run: _Run) -> None:
        """Run a batch. If that fails, a later look starts it again from what is recorded."""
        batch = run.batch
        try:
            await self._run(run)
        except MooncakeError as error:
            _log.error("batch %s cannot go on; trying again: %s", batch.id, error)
            await asyncio.sleep(RETRY_S)
        except Exception:
            _log.exception("batch %s failed here, and is started again", batch.id)
            await asyncio.sleep(RETRY_S)
        finally:
            del self._runs[batch.seq], self._tasks[batch.seq]
            self._wake.set()

    # ------------------------------------------------------------ one batch

    async def _run(self, run: _Run) -> None:
        seq = run.batch.seq
        is_gone = await self._read(partial(self._area.is_gone, run.batch.input_file_id))
        if run.batch.in_progress_s is None and not run.stopped.is_set():
            if is_gone:
                now = self._wall_s()
                await self._stored(partial(self._store.fail, self._owner, seq, [_GONE], now))
                return
            await self._check(run)
        batch = await self._stored(partial(self._store.held, self._owner, seq))
        if batch is None or run.is_lost:
            return
        if batch.in_progress_s is None:  # it was stopped before its input was checked
            await self._stored(partial(self._store.fail, self._owner, seq, (), self._wall_s()))
            return
        if batch.status != store.FINALIZING:
            if not run.stopped.is_set() and not is_gone:
                await _until(run.stopped, self._feed(run))
            if not await self._all_answered(run, is_gone=is_gone):
                return
        await self._finish(run)

    async def _check(self, run: _Run) -> None:
        """Check the input of a batch, and record what comes of it."""
        batch, config = run.batch, self._api_server.config
        checker = InputChecker(batch.endpoint, config.max_batch_lines, self._max_line_bytes)
        reader = LineReader(self._area, batch.input_file_id, self._max_line_bytes)
        while not (reader.at_end or checker.is_hopeless or run.stopped.is_set()):
            await self._read(lambda: checker.check(reader.read(SLICE_BYTES)))
        if run.stopped.is_set():
            return
        now = self._wall_s()
        if errors := checker.end():
            _log.info("batch %s failed: its input has %d mistakes", batch.id, len(errors))
            await self._stored(partial(self._store.fail, self._owner, batch.seq, errors, now))
        else:
            num_lines = checker.num_lines
            await self._stored(partial(self._store.accept, self._owner, batch.seq, num_lines, now))

    async def _feed(self, run: _Run) -> None:
        """Ask the lines of a batch that have no result, until all have one."""
        batch = run.batch
        done = await self._stored(partial(self._store.done_lines, batch.seq))
        asking: set[asyncio.Task[None]] = set()

        def answered(number: int, num_bytes: int, task: asyncio.Task[None]) -> None:
            asking.discard(task)
            self._window.give_back(batch.tenant, num_bytes)
            self._room.set()
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("line %d of batch %s failed", number, batch.id, exc_info=error)

        try:
            async with self._turns.setdefault(batch.tenant, asyncio.Lock()):
                async for number, text in self._lines_of(batch, done):
                    num_bytes = min(len(text), self._max_line_bytes)
                    await self._placed(batch.tenant, num_bytes)
                    task = asyncio.create_task(self._answer(run, number, text))
                    task.add_done_callback(partial(answered, number, num_bytes))
                    asking.add(task)
            while asking:
                await asyncio.wait(asking)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _lines_of(
        self, batch: BatchRow, done: Collection[int]
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the lines of a checked input that are not `done`."""
        # Without a limit of its own: that of the settings may have changed since the check.
        reader = LineReader(self._area, batch.input_file_id, batch.input_bytes)
        while not reader.at_end:
            for number, text in await self._read(partial(reader.read, SLICE_BYTES)):
                if number not in done:
                    assert text is not None, "it is no longer than its file"
                    yield number, text

    async def _named(
        self, batch: BatchRow, done: Collection[int]
    ) -> AsyncIterator[tuple[int, str]]:
        """Yield number and custom_id of the lines of a checked input that are not `done`."""
        async for number, text in self._lines_of(batch, done):
            yield number, lines.read_line(text).custom_id

    async def _placed(self, tenant: str, num_bytes: int) -> None:
        """Wait until a line of `tenant` may be asked, and take its place."""
        api_server = self._api_server
        while not (
            api_server.ready
            and self._window.take(
                tenant, num_bytes, has_waiting_batch=api_server.backend.has_waiting_batch
            )
        ):
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROOM_S):
                    await self._room.wait()

    async def _answer(self, run: _Run, number: int, text: bytes) -> None:
        """Ask one line until it has an answer, and record that."""
        batch = run.batch
        if len(text) <= BYTES_HERE:
            line, body = _read_line(text)
        else:
            line, body = await self._read(partial(_read_line, text))
        if run.num_bytes > self._api_server.config.max_tenant_batch_bytes:
            result = lines.not_answered(batch.id, number, line.custom_id, lines.TOO_LARGE)
        else:
            result = await self._result(batch, number, line.custom_id, body)
        run.num_bytes += len(result.text)
        while not run.is_lost:
            try:
                if not await self._recorder.record(batch.seq, result):
                    run.lose()
                return
            except MooncakeError as error:
                _log.error("a result of batch %s cannot be kept; trying again: %s", batch.id, error)
            await asyncio.sleep(RETRY_S)

    async def _result(self, batch: BatchRow, number: int, custom_id: str, body: bytes) -> Result:
        name = lines.request_name(batch.id, number)
        caller = OwnCall(batch.key_name, batch.tenant)
        num_failures = 0
        while True:
            reply = await self._ask(batch.endpoint, body, name, caller)
            is_failure = reply.status >= 500 and reply.status != 503
            num_failures += is_failure
            may_succeed = reply.status in RETRIED or (is_failure and num_failures < MAX_FAILURES)
            if not may_succeed:
                return lines.answered(batch.id, number, custom_id, reply.status, reply.body)
            given = reply.headers.get("retry-after", "")
            wait_s = float(given) if given.isdecimal() else RETRY_S
            is_refused = reply.status == 429
            with self._window.refused(batch.tenant) if is_refused else contextlib.nullcontext():
                await asyncio.sleep(wait_s)

    # ------------------------------------------------------------ its end

    async def _all_answered(self, run: _Run, *, is_gone: bool) -> bool:
        """Record why the lines without a result have none, if the batch was cancelled, has expired
        or has lost its input (`is_gone`). Return whether every line has a result now, or False if
        the lease was lost.

        Raises:
            InternalError: the batch has not ended, and a line has no result.
        """
        batch = await self._stored(partial(self._store.held, self._owner, run.batch.seq))
        if batch is None or run.is_lost:
            _log.warning("batch %s: another gateway may run it now", run.batch.id)
            return False
        done = await self._stored(partial(self._store.done_lines, batch.seq))
        if len(done) == batch.num_total:
            return True
        if batch.status == store.CANCELLING:
            code = lines.CANCELLED
        elif self._is_over(batch):
            code = lines.EXPIRED
        elif is_gone:
            code = lines.INPUT_GONE
        else:
            raise InternalError("a line has no result; the log says why")
        results: list[_Recorded] = []

        async def record() -> None:
            await self._stored(partial(self._store.record, self._owner, list(results)))
            results.clear()

        missing = _nameless(batch, done) if is_gone else self._named(batch, done)
        async for number, custom_id in missing:
            results.append((batch.seq, lines.not_answered(batch.id, number, custom_id, code)))
            if len(results) == RESULTS_AT_ONCE:
                await record()
        await record()
        return True

    async def _finish(self, run: _Run) -> None:
        """Write the files of a batch of which every line has a result, and end it."""
        names = (f"file-{self._api_server.new_id()}", f"file-{self._api_server.new_id()}")
        begin = partial(
            self._store.begin_finalizing, self._owner, run.batch.seq, names, self._wall_s()
        )
        batch = await self._stored(begin)
        if batch is None:
            return
        files: list[FileRow] = []
        if batch.output_file_id is not None:
            files.append(await self._written(batch, batch.output_file_id, is_error=False))
        if batch.error_file_id is not None:
            files.append(await self._written(batch, batch.error_file_id, is_error=True))
        finish = partial(self._store.finish, self._owner, batch.seq, files, self._wall_s())
        if await self._stored(finish):
            counts = batch.num_completed, batch.num_failed
            _log.info("batch %s %s: %d answers, %d errors", batch.id, batch.ends_as, *counts)
        await self._purge()

    async def _written(self, batch: BatchRow, file_id: str, *, is_error: bool) -> FileRow:
        """Write the results of one kind into a file, in the order of their lines."""
        writer, after = self._area.writer(file_id, self._owner), 0
        try:
            while found := await self._stored(
                partial(
                    self._store.results, batch.seq, is_error=is_error, after=after,
                    max_bytes=SLICE_BYTES,
                )
            ):  # fmt: skip
                text = b"".join(text + b"\n" for _, text in found)
                await self._read(partial(writer.write, text))
                after = found[-1][0]
            await self._read(writer.finish)
        finally:
            await self._read(writer.discard)
        now = int(self._wall_s())
        return FileRow(
            id=file_id,
            tenant=batch.tenant,
            purpose="batch_output",
            filename=f"{batch.id}_{'error' if is_error else 'output'}.jsonl",
            num_bytes=writer.num_bytes,
            created_s=now,
            expires_s=now + batch.output_kept_s,
        )


async def _nameless(batch: BatchRow, done: Collection[int]) -> AsyncIterator[tuple[int, str]]:
    """Yield a number and no custom_id for each line that is not `done`, of an input that is gone.
    The numbers are wrong if it had empty lines.
    """
    free = (number for number in itertools.count(1) if number not in done)
    for number in itertools.islice(free, batch.num_total - len(done)):
        yield number, ""


def _read_line(text: bytes) -> tuple[InputLine, bytes]:
    """Return the request of a line, and the body that it is asked with."""
    line = lines.read_line(text)
    return line, lines.request_body(line)


async def _until(stopped: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or until `stopped` is set: then it is cancelled."""
    tasks = [asyncio.create_task(work), asyncio.create_task(_wait(stopped))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        worked, _ = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(worked, Exception):
        raise worked


async def _wait(stopped: asyncio.Event) -> None:
    await stopped.wait()
