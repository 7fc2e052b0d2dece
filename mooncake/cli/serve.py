"""`mooncake serve` runs a cluster, one worker, a gateway or a pool node, until a signal."""

from __future__ import annotations

import contextlib

from rich.console import Console

from mooncake.cli.command import Command
from mooncake.launch.config.config import resolve
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import environment
from mooncake.launch.host.processes.start_phases import importing
from mooncake.launch.worker.forks import forks_workers, worker_forks

COMMON = (
    "model", "max_model_len", "kv_cache_memory_bytes", "kvstore_dram_bytes",
    "ssd", "prefill", "decode", "kvstore", "colocated", "role", "join", "bind_host",
    "tensor_parallel_size", "host", "port", "api_keys_file", "max_num_seqs", "slo_ttft_s",
    "slo_tbt_ms", "log_level", "dry_run",
)  # fmt: skip
"""The flags that people use."""

EXAMPLES = """\
mooncake serve                                             k2-demo, the small model in the package
mooncake serve checkpoints/k2-small                        1 prefill, 1 decode, 1 kvstore worker
mooncake serve checkpoints/k2-small --prefill 2 --decode 2 --slo-ttft-s 5
mooncake serve checkpoints/k2-small --colocated            one process
mooncake serve --config configs/serve/2p2d.yaml --port 9000
mooncake serve --role prefill --join 10.0.0.7:6400         one more worker for a running cluster
mooncake serve --role gateway --join 10.0.0.7:6400         one more gateway with an API
mooncake serve --role gateway --engines http://a:8000,http://b:8000   a gateway over vLLM servers
mooncake serve checkpoints/k2-small --role kvstore --dram 100GiB --ssd /mnt/nvme0:2TiB
mooncake serve checkpoints/k2-small --dry-run              print what would start, and its memory
mooncake serve --check                                     compare each kernel with its reference
"""


def run(config: ServeConfig) -> int:
    """Serve, or only check the kernels, or only print what would be started."""
    if config.check:
        return _check_kernels()
    with contextlib.ExitStack() as opened:
        forks = None
        if _computes(config) and not config.dry_run:
            environment.restart_with(environment.variables())  # before anything slow
        if not config.dry_run and forks_workers(config):
            forks = opened.enter_context(worker_forks())  # it imports while the rest goes on
        with importing():
            from mooncake.launch.cluster import serve

        return serve.dry_run(config) if config.dry_run else serve.serve(config, forks)


def _computes(config: ServeConfig) -> bool:
    """Return whether this process is an engine itself."""
    return config.colocated or config.role in ("prefill", "decode")


def _check_kernels() -> int:
    """Compare every fast op with its reference here and print a table. Return 0 if none differs."""
    from mooncake_kernels.checks import check_kernels
    from mooncake_kernels.timing import local_device

    from mooncake.telemetry.terminal import show_rows

    device, place = local_device()
    rows = [["op", "backend", "difference", "gate", ""]]
    wrong = 0
    for row in check_kernels(device):
        ran = row.difference is not None
        broken = ran or not row.note.startswith(("needs a", "not installed"))
        wrong += broken and not row.passed
        verdict = "ok" if row.passed else row.note or "DIFFERS"
        found = f"{row.difference:.1e}" if row.difference is not None else "-"
        rows.append([row.op, row.backend, found, f"{row.gate:.0e}", verdict])
    show_rows(f"kernels on {place}", rows, Console())
    return 1 if wrong else 0


COMMANDS = (
    Command(
        words="serve", examples=EXAMPLES, settings=ServeConfig, run=run, takes_file=True,
        own_read=resolve, common=COMMON, common_examples=4,
    ),
)  # fmt: skip
