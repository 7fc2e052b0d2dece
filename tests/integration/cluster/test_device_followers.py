"""A follower moves pages of its device only once the device has written them, and no step that was
begun on a guess can write there any more.
"""

from __future__ import annotations

import queue
import socket
import threading

import msgspec
import torch

from mooncake.base import MonotonicClock, PageArray
from mooncake.base.kv_layout import Move
from mooncake.engine.ranks.kv_moves import ALL_LAYERS, Moved, Opened, StartMove, decode_answer
from mooncake.engine.ranks.step_log import Ahead, CapturedSizes, StepWriter, UsePages, encode
from mooncake.launch.worker.ranks.rank_moves import RankMoves
from mooncake.model.copies import HostCopies
from mooncake.model.device.graphs import EagerSteps
from mooncake.model.device.pages import PageMemory
from mooncake.model.options import ModelOptions
from mooncake.model.parallel.group import Solo
from mooncake.model.rank_device import RankDevice
from mooncake.model.running.follower import Follower, Guesses, heard
from mooncake.transfer.engine import Op
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.net.blocking import send
from tests.support.model.page_device import FarDevice
from tests.support.model.tiny_models import layout_for, ours, random_tokens, slot, source_of, truth
from tests.support.waiting import LONG_S


class Gate:
    """A mark that is reached when a test says so."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def reached(self) -> None:
        assert self.opened.wait(LONG_S)


class LateCopies(HostCopies):
    """Of a device that has written nothing until its gate opens."""

    def __init__(self) -> None:
        self.gate = Gate()

    def mark(self) -> Gate:  # type: ignore[override]
        return self.gate


def test_a_follower_moves_pages_of_its_device_once_they_are_written() -> None:
    source = source_of(truth("grouped routing", vocab_size=212))
    config = TransferConfig(secret="s" * 32, host="here", protocols=("tcp",))
    peer = open_transfer(config, "peer", MonotonicClock())
    array = PageArray(layout_for(source.spec), 4)
    region = peer.allocate(array.layout.block_bytes, "there")
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    moves, copies = RankMoves(answers.put), LateCopies()
    memories: list[PageMemory] = []

    def device_pages(pages: PageArray) -> PageMemory:
        place = RankDevice(ModelOptions(), torch.float32)
        place.page_device = FarDevice()
        memories.append(place.pages(pages))
        return memories[-1]

    follower = Follower(ours(source), Solo(), moves=moves, copies=copies, device_pages=device_pages)
    use = UsePages(array, None, own=True, transfer=msgspec.msgpack.encode(config))
    try:
        follower.follow([(use, None)])
        opened = decode_answer(answers.get())
        assert isinstance(opened, Opened)
        assert opened.segment is not None
        machine = moves._memory.machine  # type: ignore[union-attr]
        there = array.places(peer.segment, region.region_id, [0])
        there = msgspec.structs.replace(there, layer_stride=array.layout.slice_bytes)
        move = Move(1, [2], there, 0, array.layout.num_layers)
        deadline_s = MonotonicClock().now() + LONG_S
        step = StepWriter().pack([slot(7, 0, random_tokens(16, seed=3), [2])], {})
        follower.step(step)
        moves.tell(StartMove(1, Op.WRITE, move, (1, ALL_LAYERS), deadline_s, verify=False))
        assert machine.progress == (0, 0), "the host has come to the step's end, the device not"
        assert answers.empty()
        copies.gate.opened.set()
        moved = decode_answer(answers.get(timeout=LONG_S))
        assert isinstance(moved, Moved)
        assert (moved.done.batch_id, moved.done.error) == (1, None)
        written = memories[0].kv.pages[:, 2].contiguous().view(-1).view(torch.uint8)
        assert written.any()
        assert bytes(region.buffer) == bytes(written.numpy())
        follower.follow([(use, None)])
        assert len(memories) == 2
        assert not hasattr(memories[0], "kv"), "a device has no room for two"
    finally:
        moves.close()
        peer.close()


def test_who_writes_to_pages_waits_for_guesses_that_the_follower_has_only_heard_of() -> None:
    """Else a follower that is late would write its guess over what was fetched meanwhile."""
    source = source_of(truth("grouped routing", vocab_size=212))
    array = PageArray(layout_for(source.spec), 4)
    memories: list[PageMemory] = []

    def device_pages(pages: PageArray) -> PageMemory:
        place = RankDevice(ModelOptions(), torch.float32)
        place.page_device = FarDevice()
        memories.append(place.pages(pages))
        return memories[-1]

    guesses, moves = Guesses(), RankMoves(lambda _: None)
    follower = Follower(
        ours(source), Solo(), EagerSteps, moves, device_pages=device_pages, guesses=guesses
    )
    follower.follow([(UsePages(array, None, CapturedSizes(2, 4, 0), own=True), None)])
    follower.step(StepWriter().pack([slot(7, 0, [5], [2])], {}))  # only such steps are guessed on
    lead, link = socket.socketpair()
    with lead, link:
        send(lead, encode(Ahead()))
        word = next(heard(link, guesses))
    settled = threading.Event()
    settling = threading.Thread(target=memories[0].settle, args=(lambda _: settled.set(),))
    settling.start()
    assert not settled.wait(0.5), "the guess has not been begun here"
    follower.follow([word])
    assert settled.wait(LONG_S)
    settling.join()
