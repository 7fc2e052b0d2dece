"""`docker/Dockerfile` built and run without a registry: its steps in a file system of their own.

This machine's programs stand in for the base image and for what apt brings, compilers only where
the image is built, and those packages of this environment that the lock names for what pip would
download. What is ours is done as the file says: the check of the base, environment, lock, package,
what is compiled, the copy into the image, the bill of materials, the user, the entry point.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.arch.test_images import TOP, steps
from tests.support.kubelet.sandbox import DEVICES
from tests.support.waiting import LONG_S

SITE = Path(sysconfig.get_path("purelib"))
BASE_PATH = f"{sys.base_prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TOOLS = ("pip", "setuptools")
"""Which pip has to install into the image's environment itself: its own ones are older."""
BASE = f"stand-in@sha256:{'0' * 64}"
COMPILERS = ("c++*", "cc", "clang*", "cpp*", "g++*", "gcc*", "*-gnu-g++*", "*-gnu-gcc*")
QUICK = '#!/bin/sh\nexec /usr/bin/g++ "$@" -O0'
"""A compiler for which the optimization of code for all CPUs does not take half a minute."""
OF_DEBIAN = ("pip", "pip[0-9]*")
"""This machine's, beside the Python that stands in for that of the base image."""


def why_not() -> str:
    """Return why no image can be built here; empty: it can."""
    if os.geteuid() != 0:
        return "mounts need root"
    dirs = "lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w"
    script = f"mount -t tmpfs x /mnt && mkdir /mnt/u /mnt/w && mount -t overlay o /mnt -o {dirs}"
    words = ["unshare", "--mount", "--pid", "--net", "--fork", "/bin/sh", "-ec", script]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"no overlay in a namespace here: {done.stderr.strip()}" if done.returncode else ""


def write_context(folder: Path) -> None:
    """Copy what the build may read, as `Dockerfile.dockerignore` says."""
    lines = (TOP / "docker" / "Dockerfile.dockerignore").read_text().split()
    assert lines[0] == "*"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in (line[1:] for line in lines if line.startswith("!")):
        source, target = TOP / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignore)
        else:
            shutil.copy2(source, target)


def write_wheel(name: str, folder: Path, locks: Path) -> None:
    """Pack an installed package of Python files again, and have the locks name the result."""
    found = importlib.metadata.distribution(name)
    packed = folder / f"{name}-{found.version}-py3-none-any.whl"
    with zipfile.ZipFile(packed, "w") as wheel:
        for file in found.files or []:
            if ".." not in file.parts and "__pycache__" not in file.parts:
                wheel.write(file.locate(), str(file))
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    for lock in locks.iterdir():
        line = f"{name}=={found.version} --hash=sha256:"
        lock.write_text(re.sub(rf"(?m)^{re.escape(line)}.*$", line + digest, lock.read_text()))


def downloaded(lock: Path) -> list[str]:
    """Return what packages that a lock names have in this environment's folder of packages, but for
    the tools.
    """
    names = re.findall(r"^(\S+)==", lock.read_text(), re.MULTILINE)
    files = (f for name in names if name not in TOOLS for f in importlib.metadata.files(name) or [])
    return sorted({file.parts[0] for file in files} - {"..", "__pycache__"})


class _Stage:
    """The commands that make one stage, and what its image is started with."""

    def __init__(
        self, name: str, folder: Path, context: Path, wheels: Path, given: Mapping[str, str]
    ) -> None:
        self.root = folder / name / "root"
        self.python = f"{self.root}{sys.base_prefix}"
        """Where the Python of its base image lies."""
        self.environment = {"PATH": BASE_PATH}
        self.arguments: dict[str, str] = {}
        self.words: dict[str, str] = {}
        """The words of each instruction that says how the image is used."""
        self.lines: list[str] = []
        self._directory = "/"
        self._context = context
        self._wheels = wheels
        self._given = given
        self._name = name
        self._begin(folder / name)
        for instruction, words in steps()[name]:
            self._add(instruction, words, folder)

    def _begin(self, folder: Path) -> None:
        """Make the root of this machine's files, without their user 1000."""
        root = self.root
        dirs = f"upperdir={folder}/upper,workdir={folder}/work"
        self.lines += [
            f"mkdir -p {folder}/upper {folder}/work {root}",
            f"mount -t overlay root {root} -o lowerdir=/,{dirs}",
            f"mount -t proc proc {root}/proc",
            f"mount -t tmpfs -o mode=755 dev {root}/dev",
            *(f"touch {root}/dev/{each}" for each in DEVICES),
            *(f"mount --bind /dev/{each} {root}/dev/{each}" for each in DEVICES),
            f"mkdir -m 1777 {root}/dev/shm",
            f"mount -t tmpfs -o mode=1777 tmp {root}/tmp",
            f"rm -rf {root}/opt/mooncake",
            *(f"sed -i '/^[^:]*:[^:]*:1000:/d' {root}/etc/{each}" for each in ("passwd", "group")),
            f"printf '#!/bin/sh\\n' > {root}/usr/local/sbin/apt-get",
            f"chmod 755 {root}/usr/local/sbin/apt-get",
            f"cp {Path(sys.executable).parent}/dumb-init {root}/usr/local/bin",
        ]
        for needed in (Path(sys.base_prefix), SITE):
            for parent in reversed(needed.parents):
                self.lines.append(f"mkdir -p {root}{parent}; chmod a+x {root}{parent}")
            self.lines += [f"mkdir -p {root}{needed}", *self._bound(needed, str(needed))]
        if self._name.startswith("build"):
            quick = f"{root}/usr/local/sbin/g++"
            self.lines += [f"echo {shlex.quote(QUICK)} > {quick}", f"chmod 755 {quick}"]
        else:
            folders = (f"{root}/usr/bin", f"{root}/usr/local/bin")
            places = (f"{at}/{each}" for at in folders for each in COMPILERS + OF_DEBIAN)
            base = f"upperdir={folder}/base,workdir={folder}/base-work"
            self.lines += [
                f"mkdir -p {folder}/base {folder}/base-work",
                f"mount -t overlay base {self.python} -o lowerdir={sys.base_prefix},{base}",
                f"rm -f {' '.join(places)}",
            ]

    def _bound(self, source: Path, target: str) -> list[str]:
        place = f"{self.root}{target}"
        return [
            f"mkdir -p {place}",
            f"mount --bind {source} {place}",
            f"mount -o remount,bind,ro {place}",
        ]

    def _add(self, instruction: str, words: str, folder: Path) -> None:
        match instruction:
            case "ARG":
                name, _, value = words.partition("=")
                self.arguments[name] = self._given.get(name, value)
            case "ENV":
                for pair in shlex.split(words):
                    name, _, value = pair.partition("=")
                    self.environment[name] = value.replace("$PATH", self.environment["PATH"])
            case "WORKDIR":
                self._directory = words
                self.lines.append(f"mkdir -p {self.root}{words}")
            case "COPY":
                self._copy(words.split(), folder)
            case "RUN":
                self._run(words)
            case "FROM":
                pass
            case _:
                self.words[instruction] = words

    def _copy(self, words: Sequence[str], folder: Path) -> None:
        *sources, target = words
        source = self._context
        if found := re.fullmatch(r"--from=(\S+)", sources[0]):
            source, sources = folder / found[1] / "root", sources[1:]
        place = f"{self.root}{os.path.join(self._directory, target)}"
        self.lines.append(f"mkdir -p {place}")
        for each in sources:
            whole = f"{source}/{each.lstrip('/')}"
            is_folder = each == "." or not Path(self._context, each).is_file()
            self.lines.append(f"cp -a {whole}{'/.' if is_folder else ''} {place}")

    def _run(self, words: str) -> None:
        after = []
        if found := re.match(r"--mount=type=bind,source=(\S+),target=(\S+) ", words):
            words = words[found.end() :]
            self.lines += self._bound(self._context / found[1], found[2])
            after = [f"umount {self.root}{found[2]}"]
        given = {**self.environment, **self.arguments}
        given |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/mnt"}
        self.lines += [
            *self._bound(self._wheels, "/mnt"),
            f"echo {shlex.quote(f'RUN {words}')}",
            self.started(["/bin/sh", "-ec", words], given, self._directory),
            f"umount {self.root}/mnt",
            *after,
        ]
        if made := re.fullmatch(r"python -m venv (\S+)", words):
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            place = f"{self.root}{made[1]}/lib/{version}/site-packages"
            lock = self._context / "docker" / "locks" / f"{self._name.removeprefix('build-')}.txt"
            self.lines += [f"ln -s {SITE}/{each} {place}" for each in downloaded(lock)]

    def started(
        self, words: Sequence[str], environment: dict[str, str], directory: str,
        user: Sequence[str] = (),
    ) -> str:  # fmt: skip
        """Return the command that starts `words` in the root."""
        given = [f"{name}={value}" for name, value in environment.items()]
        inside = f'cd {directory} && exec "$@"'
        whole = [
            "chroot", str(self.root), *user, "/usr/bin/env", "-i", *given,
            "/bin/sh", "-ec", inside, "sh", *words,
        ]  # fmt: skip
        return shlex.join(whole)


class RunningImage:
    """An image that was built and runs, as its user and on a root that is read-only. What it says,
    and what the build said, is in `log`.
    """

    def __init__(
        self, name: str, words: Sequence[str], folder: Path, arguments: Mapping[str, str]
    ) -> None:
        """Build the image `name`, which copies from `build-NAME`, and run it with `words`.
        `arguments`: what `--build-arg` gives.
        """
        context, wheels, layers = (folder / each for each in ("context", "wheels", "layers"))
        for each in (context, wheels, layers):
            each.mkdir(parents=True)
        write_context(context)
        for each in TOOLS:
            write_wheel(each, wheels, context / "docker" / "locks")
        given = {"BASE": BASE, **arguments}
        names = f"build-{name}", name
        stages = [_Stage(each, layers, context, wheels, given) for each in names]
        self.image = image = stages[-1]
        user, group = image.words["USER"].split(":")
        self._user = [
            "setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs",
            "--bounding-set=-all", "--inh-caps=-all",
        ]  # fmt: skip
        entry = [*json.loads(image.words["ENTRYPOINT"]), *words]
        lines = [
            "mount --make-rprivate /", "ip link set lo up", f"mount -t tmpfs layers {layers}",
            *(line for stage in stages for line in stage.lines),
            *(f"mount -o remount,bind,ro {each}" for each in (image.root, image.python)),
            "echo started",
            f"exec {image.started(entry, image.environment, '/tmp', self._user)}",
        ]  # fmt: skip
        self.log = folder / "log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--pid", "--net", "--ipc",
                 "--uts", "--fork", "--kill-child", "/bin/sh", "-ec", "\n".join(lines)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    @property
    def init(self) -> int:
        """The pid of its first process as this machine counts."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def run(self, *words: str, as_root: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command in the container."""
        init = self.init
        given = [f"{name}={value}" for name, value in self.image.environment.items()]
        return subprocess.run(
            ["nsenter", f"--target={init}", "--mount", "--net", "--pid", "--ipc", "--uts",
             f"--root=/proc/{init}/root", "--wd=/", *([] if as_root else self._user),
             "/usr/bin/env", "-i", *given, *words],
            capture_output=True, text=True, timeout=LONG_S, check=False,
        )  # fmt: skip

    def is_healthy(self) -> bool:
        """Whether the image's own check passes."""
        check = self.image.words["HEALTHCHECK"]
        words = json.loads(check[check.index("CMD ") + 4 :])
        return self.run(*words).returncode == 0

    def stop(self) -> int:
        """Tell it to end; return its exit code."""
        os.kill(self.init, signal.SIGTERM)
        return self.process.wait(60)

    def __enter__(self) -> RunningImage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, IndexError):
            os.kill(self.init, signal.SIGKILL)
        self.process.kill()
        self.process.wait(60)
