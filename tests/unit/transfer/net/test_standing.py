"""The looks at what sessions depend on; the sessions are in `tests/integration/transfer`."""

from __future__ import annotations

import pytest

from mooncake.base.rights import CredentialRole
from mooncake.identity import own_credential
from mooncake.transfer.net.handshake import ConnectingSide
from mooncake.transfer.net.peer_key import PeerKey
from mooncake.transfer.net.standing import Standing
from tests.support.fuzz.sockets import LoopStub


class Failing:
    """Sessions at which a look fails."""

    def look(self, standing: Standing) -> list[PeerKey]:
        raise RuntimeError("can't start new thread")

    def owners(self) -> list[PeerKey]:
        return []


def test_a_look_that_fails_is_not_the_last() -> None:
    standing = Standing(own_credential("s", CredentialRole.WORKER), lambda: 0.0)
    sessions, loop = Failing(), LoopStub()
    standing.watch(sessions)

    def connect(engine_id: str) -> ConnectingSide:
        raise AssertionError(engine_id)

    with pytest.raises(RuntimeError, match="new thread"):
        standing.keep_looking(loop, connect)
    assert len(loop.timers) == 1
