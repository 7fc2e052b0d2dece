"""The chart on the small kubelet, and clients of its API."""

from __future__ import annotations

import json
import ssl
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import yaml

from tests.support.kubelet.cluster import Cluster
from tests.support.kubelet.sandbox import Image
from tests.support.serve.server_process import nano_checkpoint
from tests.support.waiting import LONG_S

TOP = Path(__file__).parents[3]
CHART = TOP / "charts" / "mooncake"
CPU_VALUES = CHART / "ci" / "cpu-values.yaml"
SITE = Path(sysconfig.get_path("purelib"))
IMAGE, FORMER_IMAGE = "mooncake:test", "mooncake:former"
RELEASE = "one"
GATEWAY = f"{RELEASE}-mooncake-gateway"


def image(source: Path = TOP) -> Image:
    """Return an image whose programs are this environment's, over the package in `source`."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    own = "/opt/mooncake"
    return Image(
        {
            "PATH": path, "PYTHONPATH": f"{own}:{own}/kernels", "HOME": "/tmp",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        {own: source},
        (Path(sys.executable), Path(sys.base_prefix), SITE),
    )  # fmt: skip


@contextmanager
def cluster_in(
    folder: Path,
    images: Mapping[str, Image],
    nodes: int = 1,
    of: Path = CPU_VALUES,
    more: Mapping[str, Mapping[str, object]] | None = None,
) -> Iterator[Cluster]:
    """Run a cluster that has a checkpoint, and beside it a file of values for the chart, made of
    that in `of` with what `more` says of its sections.
    """
    nano_checkpoint(folder / "models")
    for file in (folder / "models").rglob("*.*"):
        file.chmod(0o644)  # pods are of a user of their own
    values = yaml.safe_load(of.read_text())
    values["model"]["volume"]["hostPath"]["path"] = f"{folder}/models"
    values["kvstore"]["ssd"] = [{"size": "64MiB", "storage": "64Mi"}]
    for section, changed in (more or {}).items():
        values[section] = {**values.get(section, {}), **changed}
    (folder / "values.yaml").write_text(yaml.safe_dump(values))
    with Cluster(folder, images, nodes) as cluster:
        yield cluster


class Refused(ValueError):
    """Nobody could serve it for the time being: no server took it, or one said 503."""


@dataclass
class Answer:
    """The tokens of a streamed answer, when each came, and how many of the prompt's were cached."""

    begun_s: float
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


def streamed(
    url: str,
    prompt: str,
    num_tokens: int,
    *,
    key: str = "",
    trusted: ssl.SSLContext | None = None,
    name: str = "",
) -> Answer:
    """Return a greedy streamed answer. Over HTTPS: of who is called `name` by those `trusted`.
    `key`: the API key that the client has.

    Raises:
        Refused: nobody could serve it now.
        ValueError: it was refused for another reason, or broke off.
    """
    body = {
        "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer = Answer(time.monotonic())
    ended = False
    with ExitStack() as opened:
        signed = {"Authorization": f"Bearer {key}"} if key else {}
        client = opened.enter_context(
            httpx.Client(verify=trusted or True, timeout=LONG_S, headers=signed)
        )
        named = {"sni_hostname": name} if name else None
        stream = client.stream("POST", f"{url}/v1/completions", json=body, extensions=named)
        try:
            reply = opened.enter_context(stream)
        except (httpx.ConnectError, httpx.RemoteProtocolError) as error:
            raise Refused(repr(error)) from error  # a Service without a ready pod hangs up
        if reply.status_code != 200:
            problem = Refused if reply.status_code == 503 else ValueError
            raise problem(f"{reply.status_code} {reply.read().decode()}")
        for line in reply.iter_lines():
            ended |= line == "data: [DONE]"
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ValueError(str(chunk))
                for choice in chunk["choices"]:
                    answer.tokens += choice["token_ids"] or []
                    answer.times_s.append(time.monotonic())
                if usage := chunk.get("usage"):
                    answer.num_prompt_tokens = usage["prompt_tokens"]
                    answer.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    if not ended:
        raise ValueError(f"broke off after {len(answer.tokens)} tokens")
    return answer
