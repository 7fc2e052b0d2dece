"""A follower's own memory of KV pages: its transfer engine, and the thread that moves pages on the
lead's orders.

Owns all of them; the machine (`instance.rank_pages`) decides.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from mooncake.base import MonotonicClock, MooncakeError, PageArray, SystemIds
from mooncake.base.mailbox import Mailbox
from mooncake.engine.ranks.kv_moves import (
    Opened,
    Progress,
    RankAnswer,
    RankWord,
    StartMove,
    encode_answer,
)
from mooncake.identity.credential import Credential, own_credential
from mooncake.instance.mover import OwnPages
from mooncake.instance.rank_pages import FollowerMoves, Reached
from mooncake.launch.host import machine_facts
from mooncake.launch.host.driver import Driver
from mooncake.launch.host.secrets.credentials import read_secret
from mooncake.launch.host.secrets.secret_file import SECRET_FILE, SecretFollower
from mooncake.launch.worker.page_hasher import PageHasher
from mooncake.transfer.device import DeviceMemory
from mooncake.transfer.engine import Region
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.net.endpoint import ListenAddress
from mooncake.transfer.regions import HostRegion
from mooncake.transfer.router import RoutedTransfer


class _Memory:
    """Pages, the engine that moves them and the thread that drives it."""

    def __init__(
        self,
        pages: PageArray,
        config: TransferConfig,
        answer: Callable[[RankAnswer], None],
        device: DeviceMemory | None,
    ) -> None:
        credential, file = credential_of(config)
        self.transfer: RoutedTransfer = open_transfer(
            config, SystemIds().hex(8), MonotonicClock(), credential=credential
        )
        self._following = SecretFollower(file, credential.renew)
        try:
            self.region: Region
            if device is None:
                self.region = self.transfer.allocate(pages.num_bytes, "kv-pages")
            else:
                self.region = self.transfer.register_device(device, "kv-pages")
        except BaseException:
            self._following.close()
            self.transfer.close()
            raise
        self._hasher = PageHasher(self.region, pages)
        own = OwnPages(pages, self.transfer, self.region, self._hasher)
        self.inbox: Mailbox[msgspec.Struct] = Mailbox()
        self.machine = FollowerMoves(own, answer)
        self._driver = Driver(
            self.machine, self.inbox, transfer=self.transfer, polled=[self._hasher]
        )
        self._thread = threading.Thread(target=self._run, name="rank-moves", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._driver.run()
        except BaseException:
            os._exit(1)  # this rank can move nothing any more: the lead ends all

    def close(self) -> None:
        """End all moves. Peers no longer reach the memory."""
        self._following.close()
        self._driver.stop()
        self._thread.join()
        self._hasher.close()
        self.transfer.unregister(self.region)
        self.transfer.close()


class RankMoves:
    """Moves the pages of one follower: a `model.follower.PageMoves`."""

    def __init__(
        self, send: Callable[[bytes], None], host: str | None = None, clock_ahead_s: float = 0.0
    ) -> None:
        """`send` sends an answer to the lead, from any thread. If the lead is on another machine,
        `host` is the address at which peers reach this rank, and `clock_ahead_s` is how far this
        machine's clock is ahead.
        """
        self._host = host
        self._clock_ahead_s = clock_ahead_s
        self._send = send
        self._memory: _Memory | None = None

    def close(self) -> None:
        """End all moves in the last memory, if there is one. Peers no longer reach that memory."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def open(self, pages: PageArray, transfer: bytes, device: DeviceMemory | None) -> memoryview:
        """Return a memory for `pages`; an empty one if a `device` holds them. Tell the lead where
        peers reach it, or why they cannot. Call `close` before.

        transfer: a `TransferConfig`; empty: no peer reaches the pages. Raises MooncakeError.
        """
        if not transfer:
            self._answer(Opened(None, 0))
            return memoryview(bytearray(pages.num_bytes if device is None else 0))
        try:
            config = msgspec.msgpack.decode(transfer, type=TransferConfig)
            if self._host is not None:
                config = on_this_machine(config, self._host)
            self._memory = memory = _Memory(pages, config, self._answer, device)
        except MooncakeError as error:
            self._answer(Opened(None, 0, error.message))
            raise
        self._answer(Opened(memory.transfer.segment, memory.region.region_id))
        return memory.region.buffer if isinstance(memory.region, HostRegion) else memoryview(b"")

    def tell(self, word: RankWord) -> None:
        """Carry out a message of the lead. Any thread may call this."""
        assert self._memory is not None, "the lead knows where pages lie before it moves any"
        if isinstance(word, StartMove):
            deadline_s = word.deadline_s + self._clock_ahead_s
            word = msgspec.structs.replace(word, deadline_s=deadline_s)
        self._memory.inbox.put(word)

    def reached(self, progress: Progress) -> None:
        """Record how far this rank, including its device, has computed. Only one thread at a time
        may call this.
        """
        if self._memory is not None:
            machine = self._memory.machine
            machine.progress = progress
            if machine.waiting:
                self._memory.inbox.put(Reached())

    def _answer(self, answer: RankAnswer) -> None:
        self._send(encode_answer(answer))


def credential_of(config: TransferConfig) -> tuple[Credential, Path | None]:
    """Return what a rank proves itself with, and the file that it follows. If the environment of
    its machine names a file, that one is used, since the lead's credential may expire; otherwise
    the lead's credential.
    """
    named = os.environ.get(SECRET_FILE)
    file = Path(named) if named else None
    return own_credential(read_secret(file) if file else config.secret, *config.roles), file


def on_this_machine(config: TransferConfig, host: str) -> TransferConfig:
    """Return a lead's transfer config, adapted to a rank's own machine."""
    listen = ListenAddress(host, ports=config.tcp.listen.ports)
    tcp = dataclasses.replace(config.tcp, listen=listen)
    return dataclasses.replace(config, host=machine_facts.boot_id(config.shm_directory), tcp=tcp)
