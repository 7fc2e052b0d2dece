"""The gateway process: HTTP API server, gateway machine and Conductor over one channel. It is the
same for every layout; the caller decides where the workers run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from mooncake import __version__
from mooncake.api.app import create_app
from mooncake.api.backend import GatewayBackend
from mooncake.api.config import ApiConfig, ApiKey
from mooncake.api.http.access import Keyring
from mooncake.api.http.server import bind, serve
from mooncake.api.model import ServedModel
from mooncake.base import (
    Clock,
    ConfigError,
    IdSource,
    MonotonicClock,
    Role,
    SystemIds,
    Unavailable,
    WorkerRef,
)
from mooncake.base.block_events.kv_events import KvEventsConfig
from mooncake.base.cluster_mode import Weights
from mooncake.launch.cluster.facts import GATEWAY_ID, encode_facts, read_facts, with_weights
from mooncake.launch.config.key_file import KeyFollower, read_keys
from mooncake.launch.config.options import values_of
from mooncake.launch.config.plan import ServePlan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host.build import revision
from mooncake.rpc.channel import PolledChannel
from mooncake.rpc.kv_events import KvEventPublisher
from mooncake.scheduler.gateway.gateway import Gateway
from mooncake.scheduler.gateway.status import ClusterStatus
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.scheduler.requests.permits import permits_of_one
from mooncake.telemetry.audit import reopen
from mooncake.telemetry.events import Recorders, WorkerJoined
from mooncake.telemetry.health import Vitals
from mooncake.telemetry.metrics import Metrics
from mooncake.telemetry.receipts import Receipts
from mooncake.telemetry.series import BuildInfo, CacheInfo
from mooncake.telemetry.traces import Tracer

logger = logging.getLogger(__name__)
LAYOUT_DIGITS = 12
"""Digits of a layout's fingerprint in metrics: enough to see that two differ."""


class GatewayProcess:
    """Runs gateway, Conductor and metrics over `channel`, driven by its caller's event loop."""

    def __init__(
        self,
        plan: ServePlan,
        channel: PolledChannel,
        model_name: str,
        *,
        ids: IdSource | None = None,
        clock: Clock | None = None,
        gateway_id: str = GATEWAY_ID,
        peers: Sequence[str] = (),
        has_api: bool = True,
    ) -> None:
        """`peers`: addresses of other gateways of the cluster. Without an API, call only
        `attend`.
        """
        ids = ids or SystemIds()
        self._clock = clock or MonotonicClock()
        build = BuildInfo(
            version=__version__, revision=revision(), role=Role.GATEWAY.value,
            layout=plan.layout.fingerprint[:LAYOUT_DIGITS],
        )  # fmt: skip
        self._metrics = Metrics(model_name, build, *_cache_infos(plan))
        recorders = Recorders(self._metrics)
        self._recorders = recorders
        self.channel = channel
        self._app: Any = None
        self.gateway_id = gateway_id
        self._conductor = Conductor(plan.scheduler, ids, layout=plan.layout)
        self.gateway = Gateway(
            plan.scheduler,
            WorkerRef(gateway_id, ids.hex(8), channel.address),
            self._conductor,
            channel,
            ids,
            recorders,
            peers,
            has_clients=has_api,
        )
        self.gateway.control.on_weights = self._on_weights
        self.backend = GatewayBackend(
            self.gateway, channel, self._clock, metrics=self._metrics.render
        )

    def _on_weights(self, weights: Weights) -> None:
        """Tell processes that join from now on which weights the cluster serves."""
        if self.gateway.facts:
            facts = with_weights(read_facts(self.gateway.facts), weights)
            self.gateway.facts = encode_facts(facts)

    def worker_lost(self, worker_id: str) -> None:
        """Tell the gateway that a worker's process ended; from any thread."""
        self.backend.worker_lost_threadsafe(worker_id)

    def knows(self, worker_ids: Collection[str]) -> bool:
        """Return whether all these workers have joined. Call it in the loop's thread."""
        return {member.id for member in self.status().workers} >= set(worker_ids)

    def status(self) -> ClusterStatus:
        """Return the cluster as this gateway sees it now. Call it in the loop's thread."""
        return self.gateway.status(self._clock.now())

    def end_calls(self) -> None:
        """End all running calls with an error now, without letting them finish. Call it in the
        loop's thread.
        """
        if self._app is not None:
            self._app.state.api_server.fail_all(Unavailable("the server is shutting down"))

    async def serve(
        self,
        config: ServeConfig,
        model: ServedModel,
        listener: socket.socket,
        stop: asyncio.Event,
        ready: Callable[[str, int], None],
        vitals: Callable[[], Sequence[Vitals]],
    ) -> None:
        """Serve HTTP on `listener` until `stop`, then drain. `ready` is called with the address;
        `vitals` returns the state of the workers that this process starts.
        """
        api_server = dataclasses.replace(api_config(config), gateway_id=self.gateway_id)
        with contextlib.ExitStack() as opened:
            self._app = create_app(
                self.backend,
                model,
                api_server,
                clock=self._clock,
                recorder=self._recorders,
                recent=lambda: self._metrics.recent.status(self._clock.now()),
                vitals=vitals,
                tracer=self._tracer(config, opened),
                receipts=self._receipts(api_server),
                control=self.backend,
            )
            opened.enter_context(self._driven())
            opened.enter_context(self._publishing(config.kv_events_config))
            opened.enter_context(following_keys(config, self._app.state.keyring))
            await serve(self._app, api_server, stop=stop, ready=ready, listener=listener)

    async def attend(self, stop: asyncio.Event) -> None:
        """Know workers and other gateways until `stop`, without an API server, so that no request
        comes here. At the end it says goodbye: workers that leave afterwards then wait for no
        answer from it.
        """
        with self._driven():
            await stop.wait()
            self.gateway.say_goodbye()

    def _tracer(self, config: ServeConfig, opened: contextlib.ExitStack) -> Tracer | None:
        """Return the tracer of calls, or None if none is configured. `opened` closes it."""
        if config.otlp_traces_endpoint is None:
            return None
        from mooncake.telemetry.otlp import OtlpTraces

        traces = OtlpTraces(config.otlp_traces_endpoint, self.gateway_id, self._clock.now)
        opened.callback(traces.close)
        ids = SystemIds()
        tracer = Tracer(
            traces.export, config.otlp_traces_sampling_ratio, lambda: ids.integer(53) / 2**53
        )
        self._recorders.add(tracer)
        return tracer

    def _receipts(self, config: ApiConfig) -> Receipts | None:
        """Return the store of receipts; None if no receipts are kept."""
        if not config.max_receipts:
            return None
        receipts = Receipts(config.max_receipts, self._clock, self.gateway_id)
        self._recorders.add(receipts)
        self._conductor.keeps_facts = True
        return receipts

    @contextlib.contextmanager
    def _publishing(self, config: KvEventsConfig | None) -> Iterator[None]:
        if config is None or not config.enable_kv_cache_events:
            yield
            return
        publisher = KvEventPublisher(config, time.time)
        logger.info("block events: %s, replays %s", publisher.endpoint, publisher.replay_endpoint)
        self.gateway.publish_blocks(publisher.publish)
        try:
            yield
        finally:
            publisher.close()

    @contextlib.contextmanager
    def _driven(self) -> Iterator[None]:
        self._recorders.record(
            WorkerJoined(
                worker_id=self.gateway_id, at_s=self._clock.now(), role=Role.GATEWAY, num_blocks=0
            )
        )
        self.backend.start()
        try:
            yield
        finally:
            self.backend.stop()


@contextlib.contextmanager
def following_keys(config: ServeConfig, keyring: Keyring) -> Iterator[None]:
    """Read the file of keys, if there is one, again when it changes, and on SIGHUP."""
    if config.api_keys_file is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def use(keys: tuple[ApiKey, ...]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has just ended
            loop.call_soon_threadsafe(keyring.replace, keys)

    with contextlib.closing(KeyFollower(config.api_keys_file, use)) as following:
        following.ask()  # it may have changed since it was read for the API server

        def on_signal() -> None:
            following.ask()
            reopen()

        loop.add_signal_handler(signal.SIGHUP, on_signal)
        yield


def _cache_infos(plan: ServePlan) -> list[CacheInfo]:
    """Return the KVCache figures of engines. There are none if engines join with their own
    settings, or find out on their GPU how many blocks they have.
    """
    if not plan.num_engines or plan.options.measure_pages:
        return []
    return [
        CacheInfo(
            block_size=str(plan.layout.block_tokens),
            cache_dtype=plan.layout.dtype,
            enable_prefix_caching=str(plan.engine.enable_prefix_caching).lower(),
            num_gpu_blocks=str(plan.engine.num_blocks),
        )
    ]


def check_traces(config: ServeConfig) -> None:
    """Raise ConfigError when traces are to be sent and their packages are missing or their
    variables (`OTEL_…`) are wrong.
    """
    if config.otlp_traces_endpoint is None:
        return
    try:
        from mooncake.telemetry.otlp import OtlpTraces  # of an extra

        OtlpTraces(config.otlp_traces_endpoint, "check", lambda: 0.0).close()
    except ImportError as error:
        raise ConfigError(
            f"otlp-traces-endpoint: {error}: pip install 'mooncake-serve[otlp]'"
        ) from error
    except ValueError as error:
        raise ConfigError(f"otlp-traces-endpoint: a variable OTEL_… is wrong: {error}") from error


def api_config(config: ServeConfig) -> ApiConfig:
    """Return the settings of the API. No call has more sequences than can run at a time: it would
    be refused after some of them were computed.
    """
    return ApiConfig(
        max_sequences=min(ApiConfig.max_sequences, permits_of_one(config.max_waiting_requests)),
        served_model_names=config.names,
        keys=read_keys(config.api_keys_file) if config.api_keys_file else (),
        tls=config.tls(),
        **values_of(config, ApiConfig),
    )


def listen(config: ServeConfig) -> socket.socket:
    """Return the API's listening socket. It is opened first, so that a taken port shows before
    anything starts.
    """
    return bind(api_config(config))
