"""The chart on the small kubelet, and clients of its API."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from tests.support.kubelet.cluster import Cluster
from tests.support.kubelet.sandbox import Image
from tests.support.serve.server_process import nano_checkpoint

TOP = Path(__file__).parents[3]
CHART = TOP / "charts" / "mooncake"
CPU_VALUES = CHART / "ci" / "cpu-values.yaml"
IMAGE = "mooncake:test"
RELEASE = "one"
GATEWAY = f"{RELEASE}-mooncake-gateway"


def image(source: Path = TOP) -> Image:
    """Return an image whose programs are this environment's, over the package in `source`."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return Image(
        {
            "PATH": path, "PYTHONPATH": f"{source}:{source}/kernels", "HOME": "/tmp",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
    )  # fmt: skip


@contextmanager
def cluster_in(folder: Path) -> Iterator[Cluster]:
    """Run a cluster that has a checkpoint, and beside it a file of values for the chart."""
    nano_checkpoint(folder / "models")
    values = yaml.safe_load(CPU_VALUES.read_text())
    values["model"]["volume"]["hostPath"]["path"] = f"{folder}/models"
    values["kvstore"]["ssd"] = [{"size": "64MiB", "storage": "64Mi"}]
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    with Cluster(folder, {IMAGE: image()}) as cluster:
        yield cluster


def streamed(url: str, prompt: str, num_tokens: int, **more: object) -> list[int]:
    """Return the tokens of a greedy streamed answer.

    Raises:
        ValueError: it was refused, or broke off.
    """
    body = {
        "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True, **more,
    }  # fmt: skip
    ids: list[int] = []
    ended = False
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120.0) as reply:
        if reply.status_code != 200:
            raise ValueError(f"{reply.status_code} {reply.read().decode()}")
        for line in reply.iter_lines():
            ended |= line == "data: [DONE]"
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ValueError(str(chunk))
                ids += [one for choice in chunk["choices"] for one in choice["token_ids"] or []]
    if not ended:
        raise ValueError(f"broke off after {len(ids)} tokens")
    return ids
