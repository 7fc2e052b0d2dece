"""A container as processes: namespaces, a root file system of its own, volumes, its user.

The root is a layer over this machine's files, so that a container sees the programs of its image
(this machine's) and changes none of them. `unshare` gives it a mount, pid, host name and ipc
namespace; its network is the pod's.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.kubelet.api import Object
from tests.support.waiting import LONG_S

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
SHM_BYTES = 64 * 2**20
"""What container runtimes give where no volume is mounted."""
HEARS_S = 2.0
"""How long a container may take from its root to a program that handles SIGTERM."""


@dataclass(frozen=True)
class Mount:
    """A directory or file of this machine at a place of the container."""

    source: Path
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Image:
    """What a container finds: variables and folders; all else is this machine's own."""

    environment: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Path in the container -> folder."""
    programs: Sequence[Path] = ()
    """Folders of this machine that every user of the container may reach."""

    def mounts(self) -> list[Mount]:
        return [Mount(source, target, read_only=True) for target, source in self.folders.items()]


def _context(pod: Object, container: Object) -> Object:
    """Return the security context of a container. ValueError: it would run as root against it."""
    context = {**pod["spec"].get("securityContext", {}), **container.get("securityContext", {})}
    if context.get("runAsNonRoot") and not context.get("runAsUser"):
        raise ValueError(f"{container['name']}: runAsNonRoot, and its user is root")
    return context


def _user(pod: Object, container: Object) -> list[str]:
    """Return the words that give up what the security contexts take away."""
    context = _context(pod, container)
    words = ["setpriv"]
    if (user := context.get("runAsUser")) is not None:
        words += [f"--reuid={user}", f"--regid={context.get('runAsGroup', user)}"]
        groups = context.get("fsGroup")
        words += ["--clear-groups"] if groups is None else [f"--groups={groups}"]
    if "ALL" in context.get("capabilities", {}).get("drop", []):
        words += ["--bounding-set=-all", "--inh-caps=-all"]
    if context.get("allowPrivilegeEscalation") is False:
        words.append("--no-new-privs")
    return words if len(words) > 1 else []


ENDS_WITH_PARENT = ("setpriv", "--pdeathsig=KILL")
"""Said once more after `_user`: a process that changes its user forgets it, and would outlive a
test that is killed.
"""


class Process:
    """A started container; its first process has the pid 1 of its namespace."""

    def __init__(
        self, pod: Object, container: Object, image: Image, namespace: str, folder: Path,
        mounts: Sequence[Mount], environment: Mapping[str, str], words: Sequence[str], log: Path,
    ) -> None:  # fmt: skip
        """Start it. `folder` is for its root, `log` gets what it says."""
        self._user = _user(pod, container)
        self._environment = {**image.environment, **environment}
        self._directory = container.get("workingDir", "/")
        script = _script(
            pod, container, image, folder, mounts, [*self._user, *ENDS_WITH_PARENT, *words]
        )
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*ENDS_WITH_PARENT, "ip", "netns", "exec", namespace,
                 "unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child",
                 "/bin/sh", "-ec", script],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=self._environment, start_new_session=True,
            )  # fmt: skip

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal, or None while it runs."""
        return self._process.poll()

    @property
    def init(self) -> int | None:
        """The pid of its first process as this machine counts."""
        pid = self._process.pid
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return int(children[0]) if children else None
        return None

    def signal(self, number: int) -> None:
        """Send a signal to the first process; its namespace ends with it.

        Between the commands that make the root and the program of the image, a moment, nobody would
        hear SIGTERM; container runtimes have no such moment. So wait for one who does.
        """
        with contextlib.suppress(ProcessLookupError):
            if (init := self.init) is not None:
                end_s = time.monotonic() + HEARS_S
                while number == signal.SIGTERM and not _catches(init, number):
                    if time.monotonic() > end_s:
                        break
                    time.sleep(0.01)
                os.kill(init, number)
            else:
                self._process.send_signal(number)

    def run(self, words: Sequence[str], timeout_s: float, log: Path | None = None) -> int:
        """Run a command in the container, as `kubectl exec`; return its exit code, 124 when it
        took too long, 126 where there is no container.
        """
        if (init := self.init) is None:
            return 126
        inside = [
            "nsenter", f"--target={init}", "--mount", "--net", "--pid", "--ipc", "--uts",
            f"--root=/proc/{init}/root", f"--wd=/proc/{init}/root{self._directory}",
        ]  # fmt: skip
        with (log or Path(os.devnull)).open("ab") as output:
            try:
                done = subprocess.run(
                    [*inside, *self._user, *words], env=self._environment, check=False,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    timeout=max(timeout_s, 0.0),
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return 124
        return done.returncode

    def end(self) -> None:
        """Kill what is left of it."""
        self.signal(signal.SIGKILL)
        self._process.wait(LONG_S)


def _catches(pid: int, number: int) -> bool:
    """Tell whether a process handles a signal, or has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    return bool(int(status.split("SigCgt:")[1].split()[0], 16) >> (number - 1) & 1)


def _script(
    pod: Object, container: Object, image: Image, folder: Path, mounts: Sequence[Mount],
    words: Sequence[str],
) -> str:  # fmt: skip
    """Return the commands that make the root and become the container."""
    root, quote = f"{folder}/root", shlex.quote
    directory = container.get("workingDir", "/")
    parents = {parent for place in image.programs for parent in place.parents}
    user = _context(pod, container).get("runAsUser", 0)
    read_only = container.get("securityContext", {}).get("readOnlyRootFilesystem", False)
    lines = [
        "trap 'exit 143' TERM",  # the root is made before there is a program that could be told
        f"hostname {quote(pod['metadata']['name'])}",
        "mount --make-rprivate /",
        f"mount -t tmpfs layer {folder}",
        f"mkdir {folder}/upper {folder}/work {root}",
        f"mount -t overlay root {root} -o lowerdir=/,upperdir={folder}/upper,workdir={folder}/work",
        f"mount -t proc proc {root}/proc",
        f"mount -t tmpfs -o mode=755 dev {root}/dev",
        *(f"touch {root}/dev/{name}" for name in DEVICES),
        *(f"mount --bind /dev/{name} {root}/dev/{name}" for name in DEVICES),
        f"mkdir {root}/dev/shm",
        f"mount -t tmpfs -o size={SHM_BYTES},mode=1777 shm {root}/dev/shm",
        f"mount -t tmpfs -o mode=1777 tmp {root}/tmp",
        f"mount --rbind /sys {root}/sys",
        *(f"chmod a+x {quote(f'{root}{parent}')}" for parent in sorted(parents)),
        f"grep -q '^[^:]*:[^:]*:{user}:' {root}/etc/passwd || "
        f"echo 'user:x:{user}:{user}::/tmp:/bin/sh' >> {root}/etc/passwd",
    ]
    for mount in sorted(mounts, key=lambda each: each.target):
        target = quote(f"{root}{mount.target}")
        make = f"mkdir -p {target}"
        if mount.source.is_file():
            make = f"mkdir -p $(dirname {target}); touch {target}"
        lines += [make, f"mount --bind {quote(str(mount.source))} {target}"]
        if mount.read_only:
            lines.append(f"mount -o remount,bind,ro {target}")
    if read_only:
        own_tmp = any(mount.target == "/tmp" for mount in mounts)
        fixed = [""] if own_tmp else ["", "/tmp"]
        lines += [f"mount -o remount,bind,ro {root}{at}" for at in fixed]
    start = " ".join(map(quote, words))
    inside = f"cd {quote(directory)}; exec {start}"
    return "\n".join([*lines, f"exec chroot {root} /bin/sh -ec {quote(inside)}"])


def unmount(folder: Path) -> None:
    """Take a memory volume away."""
    subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
