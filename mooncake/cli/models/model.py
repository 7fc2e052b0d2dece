"""`mooncake model …` writes checkpoints: random, quantized, encrypted. The work is done by
`model.checkpoint`; here is its progress bar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from mooncake.base import ConfigError, format_bytes
from mooncake.cli.command import Command
from mooncake.crypto.keys import HOW, KeyRing
from mooncake.launch.config.options import count, same_as, setting, text, truth
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.config.shipped import checkpoint
from mooncake.launch.host.file_digests import check, digests_of, read_list
from mooncake.launch.host.secrets.key_source import key_source, needed_keys
from mooncake.telemetry.terminal import progress

OUT = "output"
KEY = "key"
NEW = "a directory that is not there yet"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Init:
    preset: str = setting(
        "",
        text,
        OUT,
        "NAME",
        "shape of the model: k2-nano, k2-tiny, k2-small or k2-demo",
        required=True,
    )
    seed: int = setting(0, count(0), OUT, "N", "seed of the weights")
    out: str = setting("", text, OUT, "DIR", NEW, required=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    # fmt: off
    model: str = setting("", text, OUT, "DIR", "a checkpoint that is not quantized",
        positional=True, required=True)
    to: str = setting("", text, OUT, "FORMAT",
        "format: fp8 (blocks of 128 x 128, as K2-Instruct) or int4 (groups of 32, as K2-Thinking)",
        required=True)
    out: str = setting("", text, OUT, "DIR", NEW, required=True)
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsKey:
    """Settings of all commands that take the key of encrypted weights."""

    weights_key_file: str | None = same_as(ServeConfig, "weights_key_file", KEY)
    weights_key_command: str | None = same_as(ServeConfig, "weights_key_command", KEY)

    def keys(self) -> KeyRing:
        """Return the keys. Raises ConfigError when there are none."""
        source = key_source("weights-key", self.weights_key_file, self.weights_key_command)
        return needed_keys(source, f"it takes {HOW}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encrypt(WeightsKey):
    # fmt: off
    model: str = setting("", text, OUT, "DIR", "a checkpoint", positional=True, required=True)
    out: str = setting("", text, OUT, "DIR", NEW, required=True)
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rekey(WeightsKey):
    # fmt: off
    model: str = setting("", text, OUT, "DIR", "a checkpoint whose weights are encrypted",
        positional=True, required=True)
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decrypt(Rekey):
    out: str = setting("", text, OUT, "DIR", NEW, required=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digests:
    # fmt: off
    model: str = setting("", text, OUT, "DIR", "a checkpoint", positional=True, required=True)
    out: str | None = setting(None, text, OUT, "FOLDER",
        "write the list there as `digests`, and weights-digests.json for processes that read no "
        "weights: it tells them which weights the engines have; both are for a ConfigMap")
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verify:
    # fmt: off
    model: str = setting("", text, OUT, "DIR", "a checkpoint", positional=True, required=True)
    digests: str = setting("", text, OUT, "FILE",
        "list of the files' digests, as `sha256sum` prints it", required=True)
    without_weights: bool = setting(False, truth, OUT, "", "allow files of weights to be missing")
    # fmt: on


def init(wanted: Init) -> int:
    """Write the checkpoint."""
    from mooncake.model.checkpoint.making.presets import init_checkpoint

    return _write(
        f"writing {wanted.preset}",
        wanted.out,
        lambda show: init_checkpoint(wanted.preset, wanted.seed, Path(wanted.out), progress=show),
    )


def convert(wanted: Convert) -> int:
    """Write a quantized copy of a checkpoint."""
    from mooncake.model.checkpoint.making.convert import convert_checkpoint

    return _write(
        f"converting to {wanted.to}",
        wanted.out,
        lambda show: convert_checkpoint(
            checkpoint(wanted.model), Path(wanted.out), wanted.to, progress=show
        ),
    )


def encrypt(wanted: Encrypt) -> int:
    """Write a copy of a checkpoint with encrypted weights."""
    from mooncake.model.checkpoint.making.encrypt import encrypt_checkpoint

    keys = wanted.keys()
    return _write(
        "encrypting",
        wanted.out,
        lambda show: encrypt_checkpoint(Path(wanted.model), Path(wanted.out), keys, progress=show),
    )


def decrypt(wanted: Decrypt) -> int:
    """Write a copy of a checkpoint with plain weights."""
    from mooncake.model.checkpoint.making.encrypt import decrypt_checkpoint

    keys = wanted.keys()
    return _write(
        "decrypting",
        wanted.out,
        lambda show: decrypt_checkpoint(Path(wanted.model), Path(wanted.out), keys, progress=show),
    )


def rekey(wanted: Rekey) -> int:
    """Make the first of the given keys the only one that opens the checkpoint. Until then any of
    the given keys may open it.
    """
    from mooncake.model.checkpoint.making.encrypt import rekey_checkpoint

    keys = wanted.keys()
    rekey_checkpoint(Path(wanted.model), keys)
    Console(stderr=True).print(
        f"the key with id {keys.first.id.hex()} opens {wanted.model} now, and no other",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    return 0


def digests(wanted: Digests) -> int:
    """Print the SHA-256 of each file of a checkpoint, as `sha256sum` does. With `out`, write
    them into that folder instead, and `weights-digests.json` too if the weights are not encrypted.
    """
    from mooncake.model.checkpoint.files.checkpoint_files import state_digests
    from mooncake.model.checkpoint.files.encryption import read_manifest

    path = Path(wanted.model)
    lines = [f"{digest}  {name}\n" for name, digest in digests_of(path).items()]
    if wanted.out is None:
        print(*lines, sep="", end="")
        return 0
    folder = Path(wanted.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "digests").write_text("".join(lines))
        if read_manifest(path) is None:  # an encrypted checkpoint says it in its manifest
            state_digests(path, folder)
    except OSError as error:
        raise ConfigError(f"out: cannot write to {folder}: {error.strerror}") from error
    return 0


def verify(wanted: Verify) -> int:
    """Compare all files of a checkpoint with a list."""
    listed = read_list(Path(wanted.digests))
    count = check(Path(wanted.model), listed, weights=not wanted.without_weights)
    print(f"{wanted.model}: {count} files are what {wanted.digests} says")
    return 0


def _write(what: str, out: str, write: Callable[[Callable[[int, int], None]], Path]) -> int:
    """Show a progress bar while `write` works, then print what was written."""
    console = Console(stderr=True)
    with progress(what, None, console, in_bytes=True) as show:
        path = write(show)
    written = sum(file.stat().st_size for file in path.iterdir())
    console.print(
        f"wrote {path} ({format_bytes(written)}); serve it: mooncake serve {out}", soft_wrap=True
    )
    return 0


COMMANDS = (
    Command(
        words="model init", summary="write a checkpoint with random weights", settings=Init,
        run=init,
        examples="mooncake model init --preset k2-small --seed 0 --out checkpoints/k2-small",
    ),
    Command(
        words="model convert", summary="write a quantized copy", settings=Convert, run=convert,
        examples="mooncake model convert checkpoints/k2-small --to fp8 --out checkpoints/k2-fp8\n"
        "mooncake model convert checkpoints/k2-small --to int4 --out checkpoints/k2-int4",
    ),
    Command(
        words="model encrypt", summary="write a copy with encrypted weights", settings=Encrypt,
        run=encrypt,
        examples="openssl rand -hex 32 > weights.key && chmod 600 weights.key\n"
        "mooncake model encrypt checkpoints/k2 --weights-key-file weights.key --out k2-encrypted\n"
        "mooncake serve k2-encrypted --weights-key-file weights.key",
        notes="Configuration, tokenizer and templates stay plain: gateways need them, and then no "
        "key.",
    ),
    Command(
        words="model decrypt", summary="write a copy with plain weights", settings=Decrypt,
        run=decrypt,
        examples="mooncake model decrypt k2-encrypted --weights-key-file weights.key --out k2",
    ),
    Command(
        words="model rekey", summary="change the key of encrypted weights", settings=Rekey,
        run=rekey,
        examples="mooncake model rekey k2-encrypted --weights-key-file weights.key",
        notes="The file holds the new key on its first line and the old one on the next. Weights "
        "are\nnot written again: anyone who has the old key and the old encryption.json can still "
        "read them.\nIf others may have both, decrypt and encrypt the checkpoint instead.",
    ),
    Command(
        words="model digests", summary="list what each file of a checkpoint is", settings=Digests,
        run=digests,
        examples="mooncake model digests checkpoints/k2 > k2.sha256",
        notes="Make the list where you trust the files, and keep it apart from them.",
    ),
    Command(
        words="model verify", summary="compare a checkpoint with a list of digests",
        settings=Verify, run=verify,
        examples="hf download moonshotai/Kimi-K2-Instruct --revision COMMIT --local-dir k2\n"
        "mooncake model verify k2 --digests k2.sha256",
        notes="A file that is missing, altered, or not in the list is an error.",
    ),
)  # fmt: skip
