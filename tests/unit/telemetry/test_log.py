"""One record, one line, for people and for machines."""

import io
import json
import logging

import pytest

from mooncake.telemetry.log import configure_logging


def lines(*, json_lines: bool, level: str = "INFO") -> tuple[io.StringIO, logging.Logger]:
    stream = io.StringIO()
    configure_logging("decode-0", stream, level=level, json_lines=json_lines)
    return stream, logging.getLogger("mooncake.decode.worker")


def test_text_names_worker_logger_and_extras() -> None:
    stream, logger = lines(json_lines=False)
    logger.warning("lost %d blocks", 3, extra={"request_id": "r1"})
    (line,) = stream.getvalue().splitlines()
    assert "WARNING decode-0 mooncake.decode.worker: lost 3 blocks request_id=r1" in line


def test_json_is_one_object_a_line() -> None:
    stream, logger = lines(json_lines=True)
    logger.info("two\nlines", extra={"attempt": 2})
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry["message"] == "two\nlines"
    assert (entry["worker"], entry["level"], entry["attempt"]) == ("decode-0", "INFO", "2")


@pytest.mark.parametrize("json_lines", [False, True])
def test_an_exception_stays_on_its_line(json_lines: bool) -> None:
    stream, logger = lines(json_lines=json_lines)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: broken" in line


def test_configuring_twice_writes_once() -> None:
    lines(json_lines=False)
    stream, logger = lines(json_lines=False)
    logger.info("hello")
    logger.debug("not shown")
    assert len(stream.getvalue().splitlines()) == 1


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        lines(json_lines=False, level="LOUD")
