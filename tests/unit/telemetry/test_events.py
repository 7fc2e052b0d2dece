"""Events reach every listener, in order, and can be written down."""

import msgspec

from mooncake.base import FinishReason
from mooncake.telemetry.events import EventList, Finished, Recorders, Tokens

TOKENS = Tokens(request_id="r", at_s=1.0, start=0, num_tokens=2, worker_id="d0")
FINISHED = Finished(
    request_id="r", at_s=2.0, reason=FinishReason.STOP, num_prompt_tokens=3, num_output_tokens=2
)


def test_all_listeners_hear_everything_in_order() -> None:
    first, second = EventList(), EventList()
    recorders = Recorders(first, second)
    for event in (TOKENS, FINISHED):
        recorders.record(event)
    assert first.events == second.events == [TOKENS, FINISHED]


def test_no_listener_is_fine() -> None:
    Recorders().record(TOKENS)


def test_events_carry_their_name_when_written() -> None:
    written = msgspec.json.decode(msgspec.json.encode(FINISHED))
    assert written["event"] == "finished"
    assert written["reason"] == "stop"
