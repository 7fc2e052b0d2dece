"""The database of files and batches: quotas, leases, results that are recorded once, ends."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.api.batches import lines, store
from mooncake.api.batches.lines import Result
from mooncake.api.batches.store import KEPT_S, PURGED_AT_ONCE, BatchRow, BatchStore, FileRow
from mooncake.api.schema.batches import BatchError
from mooncake.base import ConfigError, Unavailable

NAMES = ("file-out", "file-err")


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[BatchStore]:
    made = BatchStore(tmp_path / "batches.sqlite")
    yield made
    made.close()


def file(name: str = "file-1", tenant: str = "a", **changes: Any) -> FileRow:
    fields: dict[str, Any] = {
        "purpose": "batch", "filename": "in.jsonl", "num_bytes": 10, "created_s": 1,
        "expires_s": 100,
    }  # fmt: skip
    return FileRow(id=name, tenant=tenant, **fields | changes)


def batch(name: str = "batch_1", tenant: str = "a", **changes: Any) -> BatchRow:
    fields: dict[str, Any] = {
        "key_name": None, "endpoint": "/v1/completions", "input_file_id": "file-1",
        "input_bytes": 10,
        "completion_window": "24h", "metadata": "null", "output_kept_s": 50, "created_s": 1,
        "expires_s": 1000,
    }  # fmt: skip
    return BatchRow(id=name, tenant=tenant, **fields | changes)


def running(kept: BatchStore, num_lines: int = 3, **changes: Any) -> int:
    """Add a batch that "me" runs; return its `seq`."""
    assert kept.add_batch(batch(**changes), 10)
    kept.claim("me", 0, 20, 100)
    [row] = [row for row in kept.renew("me", 0, 20) if row.in_progress_s is None]
    assert kept.accept("me", row.seq, num_lines, 2)
    return row.seq


def good(line: int) -> Result:
    return Result(line, False, b"good %d" % line)


def bad(line: int, code: str = "") -> Result:
    return Result(line, True, b"bad %d" % line, code)


def test_a_tenant_sees_its_own_files_and_batches(kept: BatchStore) -> None:
    assert kept.add_file(file(), 100) is None
    assert kept.add_batch(batch(), 10)
    assert kept.file("b", "file-1") is None
    assert kept.batch("b", "batch_1") is None
    assert kept.files("b", purpose=None, after=None, limit=9, newest_first=True) == []
    assert kept.batches("b", after=None, limit=9) == []
    assert kept.cancel("b", "batch_1", 5) is None
    assert kept.delete_file("b", "file-1") is False
    found = kept.file("a", "file-1")
    assert found is not None
    assert found.num_bytes == 10
    mine = kept.batch("a", "batch_1")
    assert mine is not None
    assert mine.status == store.VALIDATING


def test_files_of_a_tenant_have_a_quota(kept: BatchStore) -> None:
    assert kept.add_file(file("file-1", num_bytes=60), 100) is None
    assert kept.add_file(file("file-2", num_bytes=41), 100) == 60
    assert kept.add_file(file("file-3", "b", num_bytes=41), 100) is None
    assert kept.used_bytes("a") == 60
    assert (kept.num_files("a"), kept.num_files("c")) == (1, 0)
    assert kept.delete_file("a", "file-1") is True
    assert kept.add_file(file("file-2", num_bytes=41), 100) is None


def test_open_batches_of_a_tenant_have_a_quota(kept: BatchStore) -> None:
    assert kept.add_batch(batch("batch_1"), 1)
    assert not kept.add_batch(batch("batch_2"), 1)
    assert kept.add_batch(batch("batch_3", "b"), 1)
    kept.claim("me", 0, 20, 10)
    kept.fail("me", 1, [BatchError(code="x", message="y", line=1, param=None)], 3)
    assert kept.add_batch(batch("batch_2"), 1)


def test_pages_follow_each_other(kept: BatchStore) -> None:
    for at in range(5):
        kept.add_file(file(f"file-{at}", purpose="batch" if at % 2 else "batch_output"), 1000)
        kept.add_batch(batch(f"batch_{at}"), 10)

    def ids(after: str | None, *, newest_first: bool, purpose: str | None = None) -> list[str]:
        found = kept.files("a", purpose=purpose, after=after, limit=2, newest_first=newest_first)
        return [each.id for each in found]

    assert ids(None, newest_first=True) == ["file-4", "file-3"]
    assert ids("file-3", newest_first=True) == ["file-2", "file-1"]
    assert ids("file-3", newest_first=False) == ["file-4"]
    assert ids(None, newest_first=False, purpose="batch") == ["file-1", "file-3"]
    assert ids("file-unknown", newest_first=True) == []
    assert [each.id for each in kept.batches("a", after="batch_3", limit=2)] == [
        "batch_2",
        "batch_1",
    ]


def test_an_input_is_kept_while_a_batch_reads_it(kept: BatchStore) -> None:
    kept.add_file(file(), 100)
    seq = running(kept, 1)
    assert kept.delete_file("a", "file-1") == "batch_1"
    assert kept.expire(500) == []
    kept.record("me", [(seq, good(1))])
    kept.begin_finalizing("me", seq, NAMES, 4)
    assert kept.file_ids() == {"file-1", "file-out"}
    assert kept.finish("me", seq, [file("file-out", expires_s=900)], 5)
    assert kept.expire(500) == ["file-1"]
    assert kept.file_ids() == {"file-out"}
    assert kept.batches("a", after=None, limit=9)
    kept.expire(5 + KEPT_S)
    assert kept.batches("a", after=None, limit=9) == []


def test_old_batches_of_a_tenant_that_makes_many_are_forgotten(
    kept: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_KEPT", 2)
    seq = running(kept, 1, name="batch_0")
    for at in range(1, 5):
        kept.add_batch(batch(f"batch_{at}"), 10)
    kept.add_batch(batch("batch_b", "b"), 10)
    kept.claim("me", 0, 20, 10)
    kept.record("me", [(seq, good(1))])
    kept.begin_finalizing("me", seq, NAMES, 4)
    assert kept.finish("me", seq, [file("file-out")], 5)
    for at in (2, 3, 4):
        kept.fail("me", at + 1, [], 3)

    def names(tenant: str) -> list[str]:
        return [each.id for each in kept.batches(tenant, after=None, limit=9)]

    kept.expire(5)
    assert names("a") == ["batch_4", "batch_3", "batch_1", "batch_0"]  # open, or with results
    while kept.purge():
        pass
    kept.expire(5)
    assert names("a") == ["batch_4", "batch_3", "batch_1"]
    assert names("b") == ["batch_b"]


def test_one_gateway_runs_a_batch_until_it_gives_no_sign(kept: BatchStore) -> None:
    seq = running(kept)
    kept.claim("other", 10, 30, 100)
    assert kept.renew("other", 10, 30) == []
    assert [row.seq for row in kept.renew("me", 15, 35)] == [seq]
    kept.claim("other", 34, 54, 100)
    assert kept.renew("other", 34, 54) == []
    kept.claim("other", 36, 56, 100)
    assert [row.seq for row in kept.renew("other", 36, 56)] == [seq]
    assert kept.renew("me", 37, 57) == []
    assert kept.record("me", [(seq, good(1))]) == {seq}
    assert kept.begin_finalizing("me", seq, NAMES, 40) is None
    assert not kept.finish("me", seq, [], 40)
    assert not kept.accept("me", seq, 3, 40)
    kept.fail("me", seq, [], 40)
    assert kept.held("me", seq) is None
    assert kept.record("other", [(seq, good(1))]) == set()
    assert kept.done_lines(seq) == {1}


def test_a_lease_that_is_given_back_is_free_at_once(kept: BatchStore) -> None:
    seq = running(kept)
    kept.release("me")
    kept.claim("other", 1, 20, 100)
    assert [row.seq for row in kept.renew("other", 1, 20)] == [seq]


def test_a_lease_that_ended_is_not_renewed(kept: BatchStore) -> None:
    running(kept)
    assert kept.renew("me", 21, 41) == []


def test_tenants_take_turns_where_a_gateway_runs_few(kept: BatchStore) -> None:
    for at in range(3):
        kept.add_batch(batch(f"batch_a{at}"), 10)
    kept.add_batch(batch("batch_b", "b"), 10)
    kept.claim("me", 0, 20, 2)
    assert [row.id for row in kept.renew("me", 0, 20)] == ["batch_a0", "batch_b"]
    kept.claim("me", 0, 20, 2)
    assert len(kept.renew("me", 0, 20)) == 2


def test_a_line_has_one_result_the_first(kept: BatchStore) -> None:
    seq = running(kept)
    kept.record("me", [(seq, good(2)), (seq, bad(2)), (seq, bad(1))])
    kept.record("me", [(seq, bad(2)), (seq, good(3)), (seq, good(1))])
    row = kept.held("me", seq)
    assert row is not None
    assert (row.num_completed, row.num_failed) == (2, 1)
    assert row.num_bytes == len(b"good 2bad 1good 3")
    kept.check_integrity()
    assert kept.results(seq, is_error=False, after=0, max_bytes=99) == [
        (2, b"good 2"),
        (3, b"good 3"),
    ]
    assert kept.results(seq, is_error=False, after=0, max_bytes=1) == [(2, b"good 2")]
    assert kept.results(seq, is_error=True, after=0, max_bytes=99) == [(1, b"bad 1")]
    assert kept.results(seq, is_error=True, after=1, max_bytes=99) == []


def test_a_batch_ends_with_the_files_that_have_lines(kept: BatchStore) -> None:
    seq = running(kept, 2)
    kept.record("me", [(seq, good(1)), (seq, good(2))])
    row = kept.begin_finalizing("me", seq, NAMES, 7)
    assert row is not None
    assert (row.status, row.ends_as) == (store.FINALIZING, store.COMPLETED)
    assert (row.output_file_id, row.error_file_id) == ("file-out", None)
    again = kept.begin_finalizing("me", seq, ("other", "names"), 8)
    assert again == row
    assert kept.record("me", [(seq, bad(1))]) == {seq}
    assert kept.finish("me", seq, [file("file-out")], 9)
    ended = kept.batch("a", "batch_1")
    assert ended is not None
    assert (ended.status, ended.ended_s) == (store.COMPLETED, 9)
    assert kept.file("a", "file-out") is not None
    assert kept.purge() is True
    assert kept.purge() is False
    assert kept.results(seq, is_error=False, after=0, max_bytes=99) == []


def test_a_batch_with_a_line_that_is_missing_is_not_closed(kept: BatchStore) -> None:
    seq = running(kept, 2)
    kept.record("me", [(seq, good(1))])
    with pytest.raises(AssertionError):
        kept.begin_finalizing("me", seq, NAMES, 7)
    row = kept.held("me", seq)
    assert row is not None
    assert row.status == store.IN_PROGRESS


def test_a_cancelled_batch_and_an_expired_one_end_as_that(kept: BatchStore) -> None:
    seq = running(kept, 2)
    row = kept.cancel("a", "batch_1", 4)
    assert row is not None
    assert (row.status, row.cancelling_s) == (store.CANCELLING, 4)
    kept.record("me", [(seq, good(1)), (seq, bad(2, lines.CANCELLED))])
    row = kept.begin_finalizing("me", seq, NAMES, 7)
    assert row is not None
    assert row.ends_as == store.CANCELLED
    assert kept.finish("me", seq, [], 8)
    row = kept.cancel("a", "batch_1", 9)
    assert row is not None
    assert (row.status, row.cancelling_s) == (store.CANCELLED, 4)
    late = running(kept, 2, name="batch_2")
    kept.record("me", [(late, good(1)), (late, bad(2, lines.EXPIRED))])
    row = kept.begin_finalizing("me", late, NAMES, 7)
    assert row is not None
    assert row.ends_as == store.EXPIRED


def test_a_batch_that_was_never_read_ends_without_files(kept: BatchStore) -> None:
    kept.add_batch(batch("batch_1"), 10)
    kept.add_batch(batch("batch_2"), 10)
    kept.cancel("a", "batch_1", 4)
    kept.claim("me", 5, 20, 10)
    assert kept.accept("me", 1, 3, 5)  # its check had begun
    assert kept.held("me", 1).status == store.CANCELLING  # type: ignore[union-attr]
    kept.fail("me", 2, [], 6)
    assert kept.batch("a", "batch_2").status == store.EXPIRED  # type: ignore[union-attr]


def test_results_are_removed_a_few_at_a_time_once_their_batch_has_ended(kept: BatchStore) -> None:
    num = PURGED_AT_ONCE + 5
    seq = running(kept, num)
    kept.record("me", [(seq, good(line)) for line in range(1, num + 1)])
    assert kept.purge() is False
    assert len(kept.done_lines(seq)) == num
    kept.begin_finalizing("me", seq, NAMES, 7)
    kept.finish("me", seq, [], 8)
    assert kept.purge() is True
    assert len(kept.done_lines(seq)) == 5
    assert kept.purge() is True
    assert kept.purge() is False
    assert kept.done_lines(seq) == set()


def test_what_was_returned_is_there_after_a_restart(tmp_path: Path) -> None:
    first = BatchStore(tmp_path / "db")
    seq = running(first)
    first.record("me", [(seq, good(1))])
    second = BatchStore(tmp_path / "db")  # the first was not closed
    assert second.done_lines(seq) == {1}
    second.close()
    first.close()


def test_a_database_that_cannot_be_used_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch-dir"):
        BatchStore(tmp_path / "no" / "folder")
    (tmp_path / "text").write_text("this is no database, and it is long enough to be seen as none")
    with pytest.raises(ConfigError, match="batch-dir"):
        BatchStore(tmp_path / "text")
    newer = sqlite3.connect(tmp_path / "newer")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(ConfigError, match="newer release"):
        BatchStore(tmp_path / "newer")


def test_a_database_that_fails_is_an_error_of_now(kept: BatchStore) -> None:
    kept._db.execute("DROP TABLE results")
    with pytest.raises(Unavailable, match="batch-dir"):
        kept.done_lines(1)
    assert kept.used_bytes("a") == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["me", "other"]),
            st.sampled_from(["claim", "renew", "record", "release"]),
            st.integers(1, 4),
            st.integers(0, 15),
        ),
        max_size=25,
    )
)
def test_two_gateways_record_each_line_once(steps: list[tuple[str, str, int, int]]) -> None:
    """Whatever they do in whatever order, and however late: one holds the lease, lines are counted
    once, and no result is replaced.
    """
    kept = BatchStore(Path(":memory:"))
    seq = running(kept, 4)
    now, first = 0.0, dict[int, bytes]()
    for number, (who, what, line, later_s) in enumerate(steps):
        now += later_s
        if what == "claim":
            kept.claim(who, now, now + 20, 10)
        elif what == "renew":
            kept.renew(who, now, now + 20)
        elif what == "release":
            kept.release(who)
        else:
            text = b"%d" % number
            if not kept.record(who, [(seq, Result(line, False, text))]):
                assert kept.held(who, seq) is not None
                first.setdefault(line, text)
        assert kept.held("me", seq) is None or kept.held("other", seq) is None
        kept.check_integrity()
    found = kept.results(seq, is_error=False, after=0, max_bytes=10**6)
    assert dict(found) == first
    kept.close()
