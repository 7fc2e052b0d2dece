"""The database of files and batches: SQLite, in the one directory that gateways share.

It owns every row; `FileArea` owns the contents of files. All methods block and one thread calls
them. Each method is one transaction, so a process that is killed loses nothing that was returned.
A gateway that runs a batch holds its lease. What it writes after the lease was lost is refused.
Times are Unix times that callers give.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mooncake.api.batches import lines
from mooncake.api.batches.lines import Result
from mooncake.api.schema.batches import BatchError
from mooncake.base import ConfigError, Unavailable

SCHEMA_VERSION = 1
BUSY_S = 20.0
"""How long a transaction waits for those of other gateways."""
KEPT_S = 30 * 24 * 3600
"""Batches that have ended are listed for this long."""
MAX_KEPT = 10_000
"""Batches of one tenant that are listed. Older ones are dropped once they have ended."""
PURGED_AT_ONCE = 256
"""Rows of results that one transaction removes."""

VALIDATING, IN_PROGRESS, FINALIZING = "validating", "in_progress", "finalizing"
CANCELLING = "cancelling"
COMPLETED, FAILED, CANCELLED, EXPIRED = "completed", "failed", "cancelled", "expired"
OPEN = (VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING)
_OPEN = "status IN ('validating', 'in_progress', 'finalizing', 'cancelling')"

_SCHEMA = """
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
    purpose TEXT NOT NULL, filename TEXT NOT NULL, num_bytes INTEGER NOT NULL,
    created_s INTEGER NOT NULL, expires_s INTEGER NOT NULL
);
CREATE INDEX files_of_tenant ON files (tenant, seq);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
    key_name TEXT, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL,
    input_bytes INTEGER NOT NULL, completion_window TEXT NOT NULL, metadata TEXT NOT NULL,
    output_kept_s INTEGER NOT NULL,
    status TEXT NOT NULL, ends_as TEXT NOT NULL DEFAULT '', errors TEXT NOT NULL DEFAULT '[]',
    created_s INTEGER NOT NULL, expires_s INTEGER NOT NULL, in_progress_s INTEGER,
    finalizing_s INTEGER, cancelling_s INTEGER, ended_s INTEGER,
    num_total INTEGER NOT NULL DEFAULT 0, num_completed INTEGER NOT NULL DEFAULT 0,
    num_failed INTEGER NOT NULL DEFAULT 0, num_bytes INTEGER NOT NULL DEFAULT 0,
    output_file_id TEXT, error_file_id TEXT, owner TEXT, lease_s REAL NOT NULL DEFAULT 0
);
CREATE INDEX batches_of_tenant ON batches (tenant, seq);
CREATE TABLE results (
    batch INTEGER NOT NULL, line INTEGER NOT NULL, is_error INTEGER NOT NULL, code TEXT NOT NULL,
    text BLOB NOT NULL, UNIQUE (batch, line)
);
"""


@dataclass(frozen=True, kw_only=True)
class FileRow:
    """One file that is whole."""

    id: str
    tenant: str
    purpose: str
    filename: str
    num_bytes: int
    created_s: int
    expires_s: int
    seq: int = 0


@dataclass(frozen=True, kw_only=True)
class BatchRow:
    """A batch as the database has it. `ends_as` is the status that it will end with; it is set when
    the batch begins to be finalized.
    """

    id: str
    tenant: str
    key_name: str | None
    """The API key that it runs with; None: it was made without one."""
    endpoint: str
    input_file_id: str
    input_bytes: int
    completion_window: str
    metadata: str
    """JSON."""
    output_kept_s: int
    created_s: int
    expires_s: int
    status: str = VALIDATING
    ends_as: str = ""
    errors: str = "[]"
    """JSON of `BatchError`s."""
    in_progress_s: int | None = None
    finalizing_s: int | None = None
    cancelling_s: int | None = None
    ended_s: int | None = None
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    """Bytes of the results so far."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    seq: int = 0


_FILE = ", ".join(FileRow.__dataclass_fields__)
_BATCH = ", ".join(BatchRow.__dataclass_fields__)


class BatchStore:
    """All files and batches of one directory."""

    def __init__(self, path: Path) -> None:
        """Open the database, and create it if it is not there.

        Raises:
            ConfigError: it cannot be opened, or a newer release has written it.
        """
        try:
            if str(path) != ":memory:":
                path.touch(mode=0o600)
            # A rollback journal, and no WAL: its shared memory would bind all gateways to one host.
            self._db = sqlite3.connect(
                path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA synchronous = FULL")
            with self._transaction() as db:
                [version] = db.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    for statement in _SCHEMA.split(";\n"):
                        db.execute(statement)
                    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        except (sqlite3.Error, OSError, Unavailable) as error:
            raise ConfigError(f"batch-dir: {path} cannot be opened: {error}") from error
        if version > SCHEMA_VERSION:
            self.close()
            raise ConfigError(
                f"batch-dir: {path} was written by a newer release (version {version}); "
                "use that release, or another directory"
            )

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction.

        Raises:
            Unavailable: the database cannot be read or written now.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:  # a commit that has failed
                with contextlib.suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
            raise Unavailable(
                f"the database in `batch-dir` cannot be used now: {error}", retry_after_s=5.0
            ) from error

    # ------------------------------------------------------------ files

    def add_file(self, row: FileRow, max_bytes: int) -> int | None:
        """Add a file whose contents are in place. If the files of its tenant would take more than
        `max_bytes` together, it is not added, and the bytes that they take now are returned.
        """
        with self._transaction() as db:
            used = self._used_bytes(db, row.tenant)
            if used + row.num_bytes > max_bytes:
                return used
            _insert(db, "files", row)
            return None

    def used_bytes(self, tenant: str) -> int:
        """Return how many bytes the files of a tenant take."""
        with self._transaction() as db:
            return self._used_bytes(db, tenant)

    def num_files(self, tenant: str) -> int:
        """Return how many files a tenant has."""
        with self._transaction() as db:
            query = "SELECT count(*) FROM files WHERE tenant = ?"
            return int(db.execute(query, (tenant,)).fetchone()[0])

    def _used_bytes(self, db: sqlite3.Connection, tenant: str) -> int:
        query = "SELECT coalesce(sum(num_bytes), 0) FROM files WHERE tenant = ?"
        return int(db.execute(query, (tenant,)).fetchone()[0])

    def file(self, tenant: str, file_id: str) -> FileRow | None:
        """Return a file of this tenant."""
        with self._transaction() as db:
            found = _rows(db, FileRow, _FILE, "files WHERE tenant = ? AND id = ?", tenant, file_id)
            return next(iter(found), None)

    def files(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[FileRow]:
        """Return at most `limit` files of a tenant, those after the file `after`."""
        with self._transaction() as db:
            where, values = "tenant = ?", [tenant]
            if purpose is not None:
                where, values = f"{where} AND purpose = ?", [*values, purpose]
            return _page(db, FileRow, _FILE, "files", where, values, after, limit, newest_first)

    def delete_file(self, tenant: str, file_id: str) -> str | bool:
        """Delete a file's row; return whether there was one. The id of the open batch that reads it
        is returned instead, and nothing is deleted, if there is one.
        """
        with self._transaction() as db:
            reads = f"SELECT id FROM batches WHERE tenant = ? AND input_file_id = ? AND {_OPEN}"
            if found := db.execute(reads, (tenant, file_id)).fetchone():
                return str(found[0])
            done = db.execute("DELETE FROM files WHERE tenant = ? AND id = ?", (tenant, file_id))
            return done.rowcount > 0

    def expire(self, now: float) -> list[str]:
        """Delete the rows of files that have expired, except inputs of open batches, and of batches
        that ended long ago. Return the ids of the files.
        """
        with self._transaction() as db:
            inputs = f"SELECT input_file_id FROM batches WHERE {_OPEN}"
            gone = db.execute(
                f"SELECT id FROM files WHERE expires_s <= ? AND id NOT IN ({inputs})", (now,)
            ).fetchall()
            db.executemany("DELETE FROM files WHERE id = ?", gone)
            db.execute("DELETE FROM batches WHERE ended_s <= ?", (now - KEPT_S,))
            db.execute(
                "DELETE FROM batches WHERE ended_s IS NOT NULL AND seq IN (SELECT seq FROM (SELECT "
                "seq, row_number() OVER (PARTITION BY tenant ORDER BY seq DESC) AS place "
                "FROM batches) WHERE place > ?) "
                "AND NOT EXISTS (SELECT 1 FROM results WHERE batch = batches.seq)",
                (MAX_KEPT,),
            )
            return [str(each[0]) for each in gone]

    def file_ids(self) -> set[str]:
        """Return the ids of all files, and of those that batches are writing."""
        with self._transaction() as db:
            found = {str(each[0]) for each in db.execute("SELECT id FROM files")}
            writing = f"SELECT output_file_id, error_file_id FROM batches WHERE {_OPEN}"
            return found.union(*db.execute(writing)) - {None}

    # ------------------------------------------------------------ batches

    def add_batch(self, row: BatchRow, max_open: int) -> bool:
        """Add a batch, unless its tenant has `max_open` that have not ended. Return whether it was
        added.
        """
        with self._transaction() as db:
            query = f"SELECT count(*) FROM batches WHERE tenant = ? AND {_OPEN}"
            if db.execute(query, (row.tenant,)).fetchone()[0] >= max_open:
                return False
            _insert(db, "batches", row)
            return True

    def batch(self, tenant: str, batch_id: str) -> BatchRow | None:
        """Return a batch of this tenant."""
        with self._transaction() as db:
            return self._batch(db, tenant, batch_id)

    def _batch(self, db: sqlite3.Connection, tenant: str, batch_id: str) -> BatchRow | None:
        where = "batches WHERE tenant = ? AND id = ?"
        return next(iter(_rows(db, BatchRow, _BATCH, where, tenant, batch_id)), None)

    def batches(self, tenant: str, *, after: str | None, limit: int) -> list[BatchRow]:
        """Return at most `limit` batches of a tenant, the newest first, after the batch `after`."""
        with self._transaction() as db:
            return _page(
                db, BatchRow, _BATCH, "batches", "tenant = ?", [tenant], after, limit, True
            )

    def cancel(self, tenant: str, batch_id: str, now: float) -> BatchRow | None:
        """Ask for the end of a batch whose lines are not all answered; others stay as they are.
        Return it as it is then.
        """
        with self._transaction() as db:
            db.execute(
                "UPDATE batches SET status = 'cancelling', cancelling_s = ? WHERE tenant = ? "
                "AND id = ? AND status IN ('validating', 'in_progress')",
                (int(now), tenant, batch_id),
            )
            return self._batch(db, tenant, batch_id)

    # ------------------------------------------------------------ running

    def claim(self, owner: str, now: float, lease_s: float, max_owned: int) -> None:
        """Take the lease, until `lease_s`, of batches that no living gateway runs, so that `owner`
        has at most `max_owned`. Tenants take turns, and the oldest batch of each goes first.
        """
        with self._transaction() as db:
            [num_owned] = db.execute(
                f"SELECT count(*) FROM batches WHERE owner = ? AND {_OPEN}", (owner,)
            ).fetchone()
            free = db.execute(
                f"SELECT seq FROM batches WHERE {_OPEN} AND (owner IS NULL OR lease_s < ?) ORDER "
                "BY row_number() OVER (PARTITION BY tenant ORDER BY seq), seq LIMIT ?",
                (now, max(0, max_owned - num_owned)),
            ).fetchall()
            db.executemany(
                "UPDATE batches SET owner = ?, lease_s = ? WHERE seq = ?",
                [(owner, lease_s, seq) for (seq,) in free],
            )

    def renew(self, owner: str, now: float, lease_s: float) -> list[BatchRow]:
        """Hold the leases of `owner` that have not ended until `lease_s`. Return these batches."""
        with self._transaction() as db:
            db.execute(
                f"UPDATE batches SET lease_s = ? WHERE owner = ? AND lease_s >= ? AND {_OPEN}",
                (lease_s, owner, now),
            )
            where = f"batches WHERE owner = ? AND lease_s >= ? AND {_OPEN} ORDER BY seq"
            return _rows(db, BatchRow, _BATCH, where, owner, now)

    def release(self, owner: str) -> None:
        """Give back all leases of `owner`."""
        with self._transaction() as db:
            db.execute("UPDATE batches SET owner = NULL WHERE owner = ?", (owner,))

    def held(self, owner: str, seq: int) -> BatchRow | None:
        """Return a batch whose lease `owner` holds, or None if it has ended, or the lease was
        lost.
        """
        with self._transaction() as db:
            return self._owned(db, owner, seq)

    def _owned(self, db: sqlite3.Connection, owner: str, seq: int) -> BatchRow | None:
        where = f"batches WHERE seq = ? AND owner = ? AND {_OPEN}"
        return next(iter(_rows(db, BatchRow, _BATCH, where, seq, owner)), None)

    def accept(self, owner: str, seq: int, num_total: int, now: float) -> bool:
        """Record that the input is right and has this many lines. Return False if the lease was
        lost.
        """
        with self._transaction() as db:
            done = db.execute(
                "UPDATE batches SET status = CASE status WHEN 'validating' THEN 'in_progress' ELSE "
                f"status END, num_total = ?, in_progress_s = ? WHERE seq = ? AND owner = ? "
                f"AND in_progress_s IS NULL AND {_OPEN}",
                (num_total, int(now), seq, owner),
            )
            return done.rowcount > 0

    def fail(self, owner: str, seq: int, errors: Sequence[BatchError], now: float) -> None:
        """End a batch whose input is wrong, or whose input was never read before it ended: without
        errors it ends as cancelled or expired.
        """
        with self._transaction() as db:
            batch = self._owned(db, owner, seq)
            if batch is None:
                return
            status = FAILED if errors else CANCELLED if batch.status == CANCELLING else EXPIRED
            text = msgspec.json.encode(list(errors)).decode()
            db.execute(
                "UPDATE batches SET status = ?, errors = ?, ended_s = ?, owner = NULL "
                "WHERE seq = ?",
                (status, text, int(now), seq),
            )

    def done_lines(self, seq: int) -> set[int]:
        """Return the lines of a batch that have a result."""
        with self._transaction() as db:
            return {
                line for (line,) in db.execute("SELECT line FROM results WHERE batch = ?", (seq,))
            }

    def record(self, owner: str, results: Iterable[tuple[int, Result]]) -> set[int]:
        """Add results, each with the `seq` of its batch. The first result of a line stays. Return
        the batches whose lease was lost; their results are not added.
        """
        lost: set[int] = set()
        with self._transaction() as db:
            held: dict[int, bool] = {}
            for seq, result in results:
                if seq not in held:
                    batch = self._owned(db, owner, seq)
                    held[seq] = batch is not None and batch.status in (IN_PROGRESS, CANCELLING)
                if not held[seq]:
                    lost.add(seq)
                    continue
                done = db.execute(
                    "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?)",
                    (seq, result.line, result.is_error, result.code, result.text),
                )
                if done.rowcount > 0:
                    db.execute(
                        "UPDATE batches SET num_completed = num_completed + ?, num_failed = "
                        "num_failed + ?, num_bytes = num_bytes + ? WHERE seq = ?",
                        (not result.is_error, result.is_error, len(result.text), seq),
                    )
        return lost

    def begin_finalizing(
        self, owner: str, seq: int, file_ids: tuple[str, str], now: float
    ) -> BatchRow | None:
        """Close a batch of which every line has a result: its counts stay from now on. `file_ids`
        name the output and the error file, unless names were given before. Return it, or None if
        the lease was lost.
        """
        with self._transaction() as db:
            batch = self._owned(db, owner, seq)
            if batch is None or batch.status == FINALIZING:
                return batch
            assert batch.num_completed + batch.num_failed == batch.num_total, "a line is missing"
            late = "SELECT 1 FROM results WHERE batch = ? AND code = ? LIMIT 1"
            is_late = db.execute(late, (seq, lines.EXPIRED)).fetchone() is not None
            ends_as = EXPIRED if is_late else COMPLETED
            ends_as = CANCELLED if batch.status == CANCELLING else ends_as
            db.execute(
                "UPDATE batches SET status = 'finalizing', ends_as = ?, finalizing_s = ?, "
                "output_file_id = ?, error_file_id = ? WHERE seq = ?",
                (
                    ends_as, int(now), file_ids[0] if batch.num_completed else None,
                    file_ids[1] if batch.num_failed else None, seq,
                ),
            )  # fmt: skip
            return self._owned(db, owner, seq)

    def results(
        self, seq: int, *, is_error: bool, after: int, max_bytes: int
    ) -> list[tuple[int, bytes]]:
        """Return (line, text) of the next results after the line `after`, in order: about as many
        as fit into `max_bytes`, and at least one if there is one.
        """
        found: list[tuple[int, bytes]] = []
        with self._transaction() as db:
            rows = db.execute(
                "SELECT line, text FROM results WHERE batch = ? AND is_error = ? AND line > ? "
                "ORDER BY line",
                (seq, is_error, after),
            )
            for line, text in rows:
                found.append((line, text))
                max_bytes -= len(text)
                if max_bytes <= 0:
                    break
            rows.close()
        return found

    def finish(self, owner: str, seq: int, files: Sequence[FileRow], now: float) -> bool:
        """End a batch whose files are in place. Return False if the lease was lost."""
        with self._transaction() as db:
            batch = self._owned(db, owner, seq)
            if batch is None:
                return False
            for row in files:
                _insert(db, "files", row)
            db.execute(
                "UPDATE batches SET status = ends_as, ended_s = ?, owner = NULL WHERE seq = ?",
                (int(now), seq),
            )
            return True

    def purge(self) -> bool:
        """Remove some results of a batch that has ended. Return whether there were any."""
        with self._transaction() as db:
            found = db.execute(
                "SELECT seq FROM batches WHERE ended_s IS NOT NULL AND EXISTS "
                "(SELECT 1 FROM results WHERE batch = seq) LIMIT 1"
            ).fetchone()
            if found is None:
                return False
            db.execute(
                "DELETE FROM results WHERE rowid IN "
                "(SELECT rowid FROM results WHERE batch = ? LIMIT ?)",
                (found[0], PURGED_AT_ONCE),
            )
            return True

    def check_integrity(self) -> None:
        """Raise AssertionError when counts and results of an open batch disagree."""
        with self._transaction() as db:
            for seq, num, failed in db.execute(
                f"SELECT seq, num_completed + num_failed, num_failed FROM batches WHERE {_OPEN}"
            ).fetchall():
                query = "SELECT count(*), coalesce(sum(is_error), 0) FROM results WHERE batch = ?"
                assert db.execute(query, (seq,)).fetchone() == (num, failed)


def _insert(db: sqlite3.Connection, table: str, row: FileRow | BatchRow) -> None:
    names = [name for name in row.__dataclass_fields__ if name != "seq"]
    values = [getattr(row, name) for name in names]
    places = ", ".join("?" * len(names))
    db.execute(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({places})", values)


def _rows(
    db: sqlite3.Connection, kind: type[Any], columns: str, source: str, *values: object
) -> list[Any]:
    names = columns.split(", ")
    found = db.execute(f"SELECT {columns} FROM {source}", values).fetchall()
    return [kind(**dict(zip(names, each, strict=True))) for each in found]


def _page(
    db: sqlite3.Connection,
    kind: type[Any],
    columns: str,
    table: str,
    where: str,
    values: list[str],
    after: str | None,
    limit: int,
    newest_first: bool,
) -> list[Any]:
    """Return a page of rows; [] also if the row `after` is not there."""
    source, order = f"{table} WHERE {where}", "DESC" if newest_first else "ASC"
    given: list[object] = list(values)
    if after is not None:
        before = "<" if newest_first else ">"
        source += f" AND seq {before} (SELECT seq FROM {table} WHERE tenant = ? AND id = ?)"
        given += [values[0], after]
    return _rows(db, kind, columns, f"{source} ORDER BY seq {order} LIMIT ?", *given, limit)
