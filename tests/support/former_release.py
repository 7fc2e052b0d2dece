"""The release before this one, for tests that upgrade and go back: the commit before."""

from __future__ import annotations

import compileall
import re
import subprocess
from pathlib import Path

from mooncake.base.messages import OWN_RELEASE, Release

TOP = Path(__file__).parents[2]


def former_release(folder: Path) -> Path:
    """Return where the package and the chart of the commit before this one are; of this one, where
    the two speak no common version of the protocol: then no update is a rolling one.
    """
    folder.mkdir()
    words = ["git", "-C", str(TOP), "archive", "HEAD~1", "mooncake", "kernels", "charts"]
    archive = subprocess.run(words, check=True, capture_output=True)
    subprocess.run(["tar", "-x"], check=True, cwd=folder, input=archive.stdout)
    # As in an image: otherwise each of its processes compiles all that it imports.
    compileall.compile_dir(folder, quiet=1, workers=1)
    source = (folder / "mooncake" / "base" / "messages.py").read_text()
    said = dict(re.findall(r"^(\w*PROTOCOL_VERSION) = (\d+)$", source, re.MULTILINE))
    version = int(said["PROTOCOL_VERSION"])
    oldest = int(said.get("OLDEST_PROTOCOL_VERSION", version))
    return folder if OWN_RELEASE.speaks_with(Release("former", version, oldest)) else TOP
