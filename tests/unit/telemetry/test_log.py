"""One record, one line, for people and for machines."""

import datetime
import io
import json
import logging
from pathlib import Path

import pytest

from mooncake.telemetry.log import MAX_ALIKE_A_MINUTE, configure_logging


def lines(*, json_lines: bool, level: str = "INFO") -> tuple[io.StringIO, logging.Logger]:
    stream = io.StringIO()
    form = "json" if json_lines else "text"
    configure_logging("decode-0", stream, level=level, form=form)
    return stream, logging.getLogger("mooncake.decode.worker")


def test_text_names_worker_logger_and_extras() -> None:
    stream, logger = lines(json_lines=False)
    logger.warning("lost %d blocks", 3, extra={"request_id": "r1"})
    (line,) = stream.getvalue().splitlines()
    assert "WARNING decode-0 mooncake.decode.worker: lost 3 blocks request_id=r1" in line


def test_what_says_why_traces_cannot_be_sent_is_written_too() -> None:
    stream, _ = lines(json_lines=True)
    logging.getLogger("opentelemetry.exporter").error("no answer")
    assert '"message":"no answer"' in stream.getvalue()


def test_json_is_one_object_a_line() -> None:
    stream, logger = lines(json_lines=True)
    logger.info("two\nlines", extra={"attempt": 2})
    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry["message"] == "two\nlines"
    assert (entry["worker"], entry["level"], entry["attempt"]) == ("decode-0", "INFO", "2")


def test_a_file_has_from_info_on_what_the_stream_does_not_show(tmp_path: Path) -> None:
    stream, file = io.StringIO(), tmp_path / "log"
    for worker in ("prefill-0", "decode-0"):  # two processes, one file
        configure_logging(worker, stream, level="warning", file=str(file))
        logger = logging.getLogger("mooncake.engine")
        logger.debug("hidden")
        logger.info("told")
        logger.warning("shown")
    assert [line.split()[1:] for line in stream.getvalue().splitlines()] == [
        ["WARNING", worker, "mooncake.engine:", "shown"] for worker in ("prefill-0", "decode-0")
    ]
    assert [line.rpartition(" ")[2] for line in file.read_text().splitlines()] == [
        "told", "shown", "told", "shown",
    ]  # fmt: skip


@pytest.mark.parametrize("json_lines", [False, True])
def test_times_are_iso_8601_with_a_zone(json_lines: bool) -> None:
    stream, logger = lines(json_lines=json_lines)
    before = datetime.datetime.now().astimezone()
    logger.info("hello")
    text = stream.getvalue()
    at = datetime.datetime.fromisoformat(
        json.loads(text)["time"] if json_lines else text.split()[0]
    )
    assert at.tzinfo is not None
    assert abs(at - before) < datetime.timedelta(seconds=30)


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


def test_a_record_may_have_an_extra_of_any_type_named_kind() -> None:
    stream, logger = lines(json_lines=False)
    logger.info("hello", extra={"kind": [1]})
    assert stream.getvalue().endswith("hello kind=[1]\n")


def test_control_characters_are_spelled_out() -> None:
    stream, logger = lines(json_lines=False)
    logger.info("a\x1b[2Jb\rc\x9bd\u2028e\nf")
    assert stream.getvalue().endswith(r": a\x1b[2Jb\rc\x9bd\u2028e | f" + "\n")
    stream, logger = lines(json_lines=True)
    logger.info("a\x1b[2Jb\rc\x9bd\u2028e\nf")
    line = stream.getvalue()
    assert line.removesuffix("\n").isprintable()
    assert json.loads(line)["message"] == "a\x1b[2Jb\rc\x9bd\u2028e\nf"


def test_one_message_is_logged_only_so_often_in_a_minute() -> None:
    stream, logger = lines(json_lines=False)
    now_s = 1_000.0

    def log(name: str, message: str, *args: object) -> None:
        record = logging.LogRecord(name, logging.WARNING, "", 0, message, args, None)
        record.created = now_s
        logging.getLogger(name).handle(record)

    for number in range(MAX_ALIKE_A_MINUTE + 5):
        log(logger.name, "refused %d", number)
    log(logger.name, "another")
    log("mooncake.api.http.tracing", "refused %d", 1)
    assert len(stream.getvalue().splitlines()) == MAX_ALIKE_A_MINUTE + 2
    now_s += 60.0
    log(logger.name, "refused %d", 1)
    assert stream.getvalue().splitlines()[-1].endswith("refused 1 left_out=5")
