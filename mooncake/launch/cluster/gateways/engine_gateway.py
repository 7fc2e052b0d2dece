"""A gateway over other people's engines: `mooncake serve --role gateway --engines URL`. It starts
no worker and is in no cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
from collections import deque
from collections.abc import Callable

from rich.console import Console

from mooncake import __version__
from mooncake.api.engines.app import create_engines_app
from mooncake.api.engines.proxy import EngineProxy
from mooncake.api.http.event_loop import run_in_loop
from mooncake.api.http.server import serve
from mooncake.base import MonotonicClock, Role, SystemIds, Unavailable
from mooncake.base.mailbox import Mailbox
from mooncake.launch.cluster.gateways.gateway_process import api_config, following_keys, listen
from mooncake.launch.cluster.log_file import start_log
from mooncake.launch.config.options import values_of
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import machine_facts
from mooncake.launch.host.build import revision
from mooncake.launch.host.http_server import url_of
from mooncake.launch.host.processes.vital_threads import end_with_vital_threads
from mooncake.rpc.kv_event_reader import EventNews, EventSource, KvEventReader
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.engines.fleet import Fleet
from mooncake.telemetry.audit import configure_audit
from mooncake.telemetry.events import Recorders
from mooncake.telemetry.metrics import Metrics
from mooncake.telemetry.series import BuildInfo

logger = logging.getLogger(__name__)

NAME = "engines"
"""The model's name in metrics: the engines have their own."""
PLACEMENT = ("policy", "ttft_slo_s", "max_inflight")
"""The settings of placement that apply."""
TAKEN_AT_ONCE = 64
"""Batches of block events that are taken between two turns of streams."""


def dry_run(config: ServeConfig) -> int:
    """Print what would be served and return the exit code."""
    console = Console(markup=False)
    publishing = {engine for engine, *_ in config.engine_events}
    for url in config.engines:
        known = "block events" if url in publishing else "what is sent there"
        console.print(f"{url}: prefixes by {known}", soft_wrap=True, highlight=False)
    console.print(f"placement: {config.policy}; API at {config.host}:{config.port}")
    return 0


def serve_engines(config: ServeConfig) -> int:
    """Serve until SIGINT or SIGTERM and return the exit code.

    Raises:
        MooncakeError: the port is taken, or an address of block events cannot be one.
    """
    machine_facts.check_port(config.host, config.port)
    name = f"gateway-{machine_facts.host_name()}"
    start_log(name, config.log_level, config.log_format, config.log_file)
    configure_audit(name, config.audit_log)
    end_with_vital_threads()
    return run_in_loop(_serve(config, name))


async def _serve(config: ServeConfig, name: str) -> int:
    api = dataclasses.replace(
        api_config(config), served_model_names=(), gateway_id=name, docs=False
    )
    clock, ids = MonotonicClock(), SystemIds()
    build = BuildInfo(
        version=__version__, revision=revision(), role=Role.GATEWAY.value, layout=""
    )  # fmt: skip
    metrics = Metrics(NAME, build)
    recorders = Recorders(metrics)
    given = values_of(config, SchedulerConfig)
    placement = SchedulerConfig(**{each: given[each] for each in PLACEMENT})
    sources = [EventSource(*each) for each in config.engine_events]
    fleet = Fleet(config.engines, placement, {source.engine for source in sources})
    stop = asyncio.Event()
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(contextlib.closing(listen(config)))
        reader = _read(sources, fleet, opened) if sources else None
        proxy = EngineProxy(
            fleet, config.engines, api, ids=ids, clock=clock, recorder=recorders,
            metrics=metrics.render, engine_key=config.engine_api_key,
            came_up=reader.restart if reader is not None else lambda _: None,
        )  # fmt: skip
        app = create_engines_app(proxy, ids=ids, clock=clock, recorder=recorders)
        _on_signals(stop, proxy)
        opened.enter_context(following_keys(config, app.state.keyring))
        await serve(
            app, api, stop=stop, listener=listener,
            ready=lambda host, port: _announce(config, host, port),
        )  # fmt: skip
    return 0


def _read(sources: list[EventSource], fleet: Fleet, opened: contextlib.ExitStack) -> KvEventReader:
    """Have block events reach the fleet in this loop. `opened` ends it."""
    reader = KvEventReader(sources)
    opened.callback(reader.close)
    loop = asyncio.get_running_loop()
    loop.add_reader(reader.news.fileno(), taking(reader.news, fleet))
    opened.callback(loop.remove_reader, reader.news.fileno())
    return reader


def taking(news: Mailbox[EventNews], fleet: Fleet) -> Callable[[], None]:
    """Return what brings news to the fleet, a few at each call: a replay has thousands, and streams
    have their turn between.
    """
    waiting: deque[EventNews] = deque()

    def take() -> None:
        if not waiting:
            waiting.extend(news.receive())
        for _ in range(min(len(waiting), TAKEN_AT_ONCE)):
            source, events = waiting.popleft()
            try:
                fleet.on_events(source.engine, source, events)
            except Exception:  # the next ones are taken
                logger.exception("%s: its block events cannot be taken", source.engine)
                fleet.on_events(source.engine, source, None)
        if waiting:
            news.ring()

    return take


def _on_signals(stop: asyncio.Event, proxy: EngineProxy) -> None:
    """Stop at the first signal; end the running calls at the second."""

    def on_signal() -> None:
        if stop.is_set():
            proxy.fail_all(Unavailable("the server is shutting down"))
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def _announce(config: ServeConfig, host: str, port: int) -> None:
    url = url_of(host, port, "http" if config.ssl_certfile is None else "https")
    text = f"serving {NAME} on {url}/v1 - {len(config.engines)} of them; Ctrl-C stops"
    if config.log_format == "json":
        logger.info(text)
    else:
        Console(stderr=True, markup=False).print(text, soft_wrap=True)
