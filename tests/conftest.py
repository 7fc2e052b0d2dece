"""What holds for all tests. Some of it is set before anything imports Triton: without a GPU its
kernels run in its interpreter.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.examples import examples

# Machines are slow at times: no test of a property is about how long an example takes.
settings.register_profile("untimed", deadline=None, max_examples=examples(100))
settings.load_profile("untimed")

if "PYTEST_XDIST_WORKER" in os.environ:  # every worker has a core: threads of its own would wait
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _logging_as_before() -> Iterator[None]:
    """What a test starts in this process may configure logging; the next one must not see that."""
    logger = logging.getLogger("mooncake")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    disabled = logging.root.manager.disable
    yield
    logging.disable(disabled)
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


logging_as_before = pytest.fixture(autouse=True)(_logging_as_before)
logging_before_the_module = pytest.fixture(autouse=True, scope="module")(_logging_as_before)
"""What fixtures of a module start may do so, too."""
