"""The steps of docs/changing-machines.md, on machines made of namespaces, while clients ask. The
other release is the commit before this one. `make soak-changes` runs it, which takes minutes.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import mooncake
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import ClusterKeys, own_credential
from tests.support.former_release import former_release
from tests.support.hosts.described import FOLDER, INIT, MOONCAKE, UP, DescribedCluster
from tests.support.hosts.hosts import DISK, HOME, SHARED, Host, Program, hosts
from tests.support.hosts.soak.asker import API_PORT, Asker
from tests.support.hosts.soak.cluster import until
from tests.support.hosts.soak.faults import Fault
from tests.support.hosts.soak.verdict import Span, problems_of
from tests.support.serve.server_process import nano_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(5400),
    pytest.mark.skipif("MOONCAKE_CHANGES" not in os.environ, reason="by `make soak-changes`"),
]

PAGE = Path(__file__).parents[3] / "docs" / "changing-machines.md"
PROMPTS = [f"{n} quick brown foxes jump over the lazy dog. " * 40 for n in range(2, 6)]
LENGTHS = (8, 24)
RATE = 0.5
MOST = 8
"""Answers that may be still to come: a busy machine is asked less often."""
SILENCE_S = 240.0
"""Far more than anything takes but on a machine that has something else to do."""
WHOLE_S = 900.0
STEP_S = 0.2
ROLES = ("gateway", "prefill", "decode", "kvstore")
STAY = ("grow", "rotate the secret", "rotate certificates")
"""Changes meanwhile which all pool nodes stay as they are."""
COUNTS = "has been read again and is used now"
SHOWN = """
import ssl, sys
print(ssl.get_server_certificate((sys.argv[1], int(sys.argv[2]))))
"""


def typed(section: str) -> list[str]:
    """Return the commands of a section of the page."""
    _, _, rest = PAGE.read_text().partition(f"\n## {section}\n")
    return re.findall(r"^    (.+)$", rest.partition("\n## ")[0], re.MULTILINE)


def described(model: Path) -> dict[str, Any]:
    """Return a cluster in which each role runs on both machines."""
    return {
        "model": f"{SHARED}/{model.name}",
        "machines": {name: dict.fromkeys(ROLES, 1) for name in "ab"},
        "settings": {"dtype": "float32", "kv-cache-memory-bytes": "32MiB"},
        "kvstore": {
            "kvstore-dram-bytes": "32MiB", "ssd": f"{DISK}/pool:32MiB", "ssd-min-uses": 1,
            "ssd-write-at": 0,
        },
    }  # fmt: skip


class Operator(DescribedCluster):
    """Follows the page on three machines; a program on the third one asks the gateways."""

    def __init__(self, machines: Sequence[Host], model: Path, former: str) -> None:
        self._told = described(model)
        super().__init__(machines[:2], self._told)
        self.machines = {each.name: each for each in machines}
        self._former = {"PYTHONPATH": f"{former}:{former}/kernels"}
        self._running: dict[str, Program] = {}
        self._settled_s: dict[str, float] = {}
        self.spans: list[tuple[str, Span]] = []
        """What was done, and when; the fault names the machine whose gateway may end."""
        for name in "ab":
            self.start(name, is_former=True)
        plan = {
            "prompts": PROMPTS, "lengths": LENGTHS, "seed": 0, "rate": RATE, "silence_s": SILENCE_S,
            "most": MOST,
        }  # fmt: skip
        first = machines[0].path(f"{HOME}/k2/a/ca.pem")
        self.asker = Asker(machines[2], machines[:2], first, plan)

    # -- what the page says

    def describe(self, **machines: dict[str, Any]) -> None:
        """Change the file, and copy the folders of its machines."""
        self._told["machines"] |= machines
        named = {n: counts for n, counts in self._told["machines"].items() if counts}
        self._told["machines"] = named
        for name, counts in named.items():
            counts["address"] = self.machines[name].address
        file = self.machines["a"].path(f"{HOME}/k2.yaml")
        file.write_text(yaml.safe_dump(self._told, sort_keys=False))
        self.type(*typed("Change the file"))
        self.copy()

    def type(self, *lines: str) -> None:
        """Type lines where the folder of all machines lies."""
        for line in lines:
            here = line.replace("mooncake ", f"{MOONCAKE} ")
            self.machines["a"].check("sh", "-ec", f"umask 077; {here}", seconds=WHOLE_S)

    def copy(self) -> None:
        for name in self._told["machines"]:
            self.install(self.machines[name])

    def start(self, name: str, *, is_former: bool = False) -> Program:
        self._running[name] = self.up(self.machines[name], self._former if is_former else None)
        return self._running[name]

    def stop(self, name: str) -> None:
        program = self._running.pop(name)
        assert program.stop() == 0, program.output

    def lose(self, name: str) -> None:
        """Have a machine lose its power."""
        self.machines[name].vanish()
        del self._running[name]

    def restart(self, name: str, *, is_former: bool = False) -> None:
        """Restart a machine, with this release or the former one."""
        self.stop(name)
        self.start(name, is_former=is_former).wait_for("all processes of k2.yaml are here", WHOLE_S)

    def trusted(self) -> list[ClusterKeys]:
        """Return whose signatures the machines accept, by their credentials."""
        found = [
            own_credential(file.read_text(), *CredentialRole).clusters
            for name in self._running
            for file in self.machines[name].path(f"{HOME}/{FOLDER}").glob("*.credential")
        ]
        assert len({*map(tuple, found)}) == 1
        return [*found[0]]

    def rotate(self, line: str) -> list[ClusterKeys]:
        """Do one step of a new secret, and wait until all processes have read their credentials.
        Return what they accept then.
        """
        wanted = self._num_read() + len(self.pids())
        self.type(line, *typed("Change the file"))
        self.copy()
        self.wait(lambda: self._num_read() >= wanted, "new credentials")
        self.go_on(2)
        return self.trusted()

    def _num_read(self) -> int:
        return sum(each.output.count(COUNTS) for each in self._running.values())

    def kill(self, name: str, role: str) -> None:
        self.machines[name].check("sh", "-c", f"kill -9 $(pgrep -f '[r]ole={role}')")

    def pids(self) -> set[str]:
        found = {
            f"{name} {pid}"
            for name in self._running
            for pid in self.machines[name].check("pgrep", "-f", "[-]-role=").split()
        }
        assert found
        return found

    # -- what comes of it

    def wait(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds."""

        def step() -> None:
            time.sleep(STEP_S)
            self.asker.read()
            for name, program in self._running.items():
                assert program.process.poll() is None, f"{name} has ended: {program.output}"

        assert until(holds, WHOLE_S, step), f"{what}: {self.asker.status()}"

    def go_on(self, count: int = 2 * len(PROMPTS)) -> None:
        """Wait until so many requests have been answered that were asked from now on."""
        now_s = time.time()

        def answered() -> bool:
            begun: list[float] = [each["tries"][0]["from_s"] for each in self.asker.answers()]
            return sum(from_s > now_s for from_s in begun) >= count

        self.wait(answered, "answers")

    def await_whole(self) -> None:
        """Wait until all gateways know all processes."""
        now_s, machines = time.time(), self._told["machines"]
        workers = [
            f"{role}@{name}" for name in machines for role in ROLES[1:] if role in machines[name]
        ]
        gateways = sum("gateway" in each for each in machines.values())
        self.wait(lambda: self.asker.is_whole(workers, gateways, now_s), "all processes")

    @contextmanager
    def doing(self, what: str, name: str = "", kind: str = "restart") -> Iterator[None]:
        """Do something that may end the gateway of a machine; afterwards clients ask until each
        prompt has come to new workers, and then as often as before.
        """
        begun_s = time.time()
        yield
        self.await_whole()
        now_s = time.time()
        self.spans.append((what, Span(Fault(kind, name, "gateway"), begun_s, now_s, now_s)))
        self.go_on()
        self._settled_s[what] = time.time()
        self.go_on()

    def share(self, from_s: float, to_s: float) -> tuple[float, int]:
        """Return which part of the prompts was cached, of the answers begun then, and how many."""
        used = [
            one["usage"]
            for answer in self.asker.answers()
            for one in answer["tries"]
            if one["how"] == "whole" and from_s <= one["from_s"] < to_s
        ]
        cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in used)
        return cached / max(1, sum(each["prompt_tokens"] for each in used)), len(used)

    def shares(self, begun_s: float) -> dict[str, float]:
        """Return the share of cached tokens before all changes, during each, and once clients have
        gone on after it; print them.
        """
        marks = [("before", begun_s, self.spans[0][1].from_s)]
        nexts = [span.from_s for _, span in self.spans[1:]] + [time.time()]
        for (what, span), next_s in zip(self.spans, nexts, strict=True):
            marks.append((f"during: {what}", span.from_s, span.to_s))
            marks.append((f"after: {what}", self._settled_s[what], next_s))
        found = {}
        for what, from_s, to_s in marks:
            found[what], number = self.share(from_s, to_s)
            print(f"{what}: {to_s - from_s:.0f} s, {number} answers, {found[what]:.4f} cached")
        return found

    def problems(self, right: Sequence[Sequence[int]]) -> list[str]:
        """Return what is wrong with the answers, and who was refused by a gateway that stayed."""
        names = {host.address: name for name, host in self.machines.items()}
        spans = [span for _, span in self.spans]
        found = list[str]()
        for answer in self.asker.answers():
            for one in answer["tries"]:
                one["host"] = names[one["host"]]
                ended = any(
                    span.fault.host == one["host"] and span.touches(one["from_s"], one["to_s"])
                    for span in spans
                )
                if one["how"] in ("refused", "away") and not ended:
                    found.append(f"request {answer['answer']}: {one}")
            ids = right[answer["prompt"]][: answer["length"]]
            found += problems_of(answer, ids, spans)
        return found


def test_a_cluster_is_changed_while_it_serves(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    model = nano_checkpoint(shared)
    with mooncake.LLM(str(model), dtype="float32", kv_cache_memory_bytes="32MiB") as llm:
        sampled = llm.generate(PROMPTS, max_tokens=max(LENGTHS), temperature=0, ignore_eos=True)
    right = [list(each.outputs[0].token_ids) for each in sampled]
    found = former_release(shared / "former")
    former = str(found).replace(str(shared), SHARED)
    assert typed("Change the file") == [f"mooncake {' '.join(INIT)}"]
    assert f"type `mooncake {' '.join(UP)}` on it" in PAGE.read_text()
    with hosts(3, tmp_path / "hosts", shared) as machines:
        a, b, c = machines
        operator = Operator(machines, model, former)
        operator.await_whole()
        operator.asker.begin()
        operator.go_on()
        begun_s = time.time()
        operator.go_on()

        for name in "ab":
            with operator.doing(f"upgrade {name}", name):
                operator.restart(name)
        with operator.doing("grow"):
            operator.describe(c={"decode": 1, "kvstore": 1})
            operator.start("c").wait_for("all processes of k2.yaml are here", WHOLE_S)
        before, old = operator.pids(), operator.trusted()
        with operator.doing("rotate the secret"):
            seen = [operator.rotate(line) for line in typed("Change the cluster secret")[1:]]
        [new] = seen[-1]
        assert seen == [[*old, new], [new, *old], [new]]
        with operator.doing("rotate certificates"):
            operator.type(*typed("Change certificates"))
            operator.copy()
            wanted = a.path(f"{HOME}/k2/b/cert.pem").read_text().strip()
            shown = (sys.executable, "-c", SHOWN, b.address, str(API_PORT))
            operator.wait(lambda: c.check(*shown).strip() == wanted, "the new certificate")
        assert operator.pids() == before, "nothing was restarted"
        with operator.doing("shrink"):
            operator.stop("c")
            operator.describe(c={})
        with operator.doing("go back, replace the disk", "b"):
            operator.stop("b")
            b.check("mount", "-t", "tmpfs", "-o", "size=64m", "new", DISK)
            operator.start("b", is_former=True).wait_for("all processes of k2.yaml", WHOLE_S)
            assert b.path(f"{DISK}/pool").exists()
        with operator.doing("lose b", "b", "vanish"):
            operator.lose("b")
            operator.go_on(len(PROMPTS))
            b.come_back()
            operator.install(b)
            operator.start("b", is_former=True).wait_for("all processes of k2.yaml", WHOLE_S)
        with operator.doing("kill each kind of process of a", "a", "kill"):
            for role in ROLES[::-1]:
                operator.kill("a", role)
                operator.go_on(2)
        operator.asker.end()
        operator.wait(lambda: operator.asker.status()["running"] == 0, "the last answers")
        operator.wait(operator.asker.is_idle, "nothing is held for requests that ended")
        operator.asker.end()
        operator.asker.wait(WHOLE_S)
        shares = operator.shares(begun_s)
        assert operator.problems(right) == []
        for name in "ab":
            operator.stop(name)
        warm = {what: share for what, share in shares.items() if not what.startswith("during")}
        warm |= {what: shares[f"during: {what}"] for what in STAY}
        assert min(warm.values()) >= 0.98 * shares["before"], warm
