"""An engine that the cluster has given up, and that learns of it."""

from __future__ import annotations

from mooncake.base import PeerLost, RequestTask, StepOutputs
from mooncake.base.messages import NextLife, WorkerRef
from mooncake.base.pool_messages import AnyMessage
from mooncake.decode.worker import DecodeWorker
from mooncake.instance.role import GIVEN_UP
from mooncake.sim.world.world import GATEWAY_ADDRESS
from tests.support.sim.cluster import Cluster, request, specs

GATEWAY = WorkerRef(GATEWAY_ADDRESS, "", GATEWAY_ADDRESS)


def test_it_ends_its_jobs_takes_no_more_and_comes_back_when_its_step_has_ended() -> None:
    cluster = Cluster(specs(1, 1))
    decode = cluster.world.workers["decode-0"]
    told: list[StepOutputs] = []

    def note(source: str, _target: str, message: AnyMessage) -> None:
        if isinstance(message, StepOutputs) and message.worker.worker_id == "decode-0":
            told.append(message)

    cluster.world.network.listener = note
    cluster.world.submit(request("first", list(range(1, 30)), max_tokens=100))
    while not told:
        cluster.run(0.01)
    machine, process = decode.machine, decode.process
    assert isinstance(machine, DecodeWorker)
    assert process is not None
    told.clear()
    machine.handle(PeerLost(worker=machine.instance.worker), process.now())
    machine.handle(
        RequestTask(
            request=request("second", [1, 2, 3]), attempt=1, gateway=GATEWAY,
            decode=machine.instance.worker,
        ),
        process.now(),
    )  # fmt: skip
    machine.tick(process.now())
    ends = {each.request_id: each.finish for message in told for each in message.outputs}
    for name in ("first", "second"):
        finish = ends[name]
        assert finish is not None
        assert finish.failure is not None
        assert finish.failure.message == GIVEN_UP
    assert machine.next_life is None, "a step still runs"
    while not machine.instance.engine.idle:
        cluster.run(0.001)
    assert machine.next_life == NextLife()
