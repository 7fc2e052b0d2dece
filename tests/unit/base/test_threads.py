"""Work in threads with a deep stack: values, errors, and the size of other threads' stacks."""

from __future__ import annotations

import threading

import pytest

from mooncake.base.threads import STACK_BYTES, run_deep, start_deep_thread


def test_values_and_errors_come_back() -> None:
    assert run_deep(lambda: 6 * 7) == 42
    with pytest.raises(ZeroDivisionError):
        run_deep(lambda: 1 // 0)


def test_only_these_threads_have_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    before = threading.stack_size()
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        sizes.append(threading.stack_size())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    start_deep_thread(lambda: None, "test").join()
    assert sizes == [STACK_BYTES]
    assert threading.stack_size() == before
