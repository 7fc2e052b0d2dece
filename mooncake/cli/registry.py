"""All commands of `mooncake`, also for those who document them.

`describe()` returns them in the order of `--help`, with their flags, which are made of the very
settings that the command line and configuration files are read by:

>>> for command in describe():
...     for flag in command.flags:
...         print(command.words, flag.names, flag.default, flag.option.text)
"""

from __future__ import annotations

import dataclasses
import importlib

from mooncake.cli.command import Command

SUMMARIES = {
    "serve": "serve a checkpoint",
    "up": "run this machine's part of a cluster",
    "cluster": "make the secret and certificates of a cluster's machines",
    "doctor": "check a machine: driver, NICs, limits, clock, peers, disks",
    "model": "work with checkpoints",
    "train": "train a small checkpoint on generated tasks",
    "ranks": "compute stages of engines that other machines lead",
    "status": "show workers, pool and load",
    "explain": "say which workers a call had, why, and where its time went",
    "top": "show what each worker does, again and again",
    "chat": "talk to a server in the terminal",
    "pool": "inspect a pool, store and read values",
    "credential": "make a credential with fewer rights than the cluster secret",
    "signer": "give processes credentials and certificates of their role",
    "enrol": "get this process' credential and certificate from a signer",
    "certificates": "make certificates for TLS between hosts",
    "bench": "measure a server or an engine",
    "eval": "count right answers of an OpenAI endpoint",
    "conformance": "check a server for faults that users of disaggregated servers report",
    "simulate": "play a trace, or faults, on a simulated cluster",
    "plan": "find the smallest cluster for a trace and limits, or for the load now",
    "trace": "describe a trace, and what a pool would hit",
    "profile": "time an engine's steps here and fit the cost model",
    "tune": "measure kernel configurations on this GPU",
    "compile": "compile kernels ahead of time, for other machines' GPUs or for CPUs",
    "completion": "print a script that completes commands in bash or zsh",
    "version": "print the version",
}
"""The first word of each command; the module of that name in this package has its `COMMANDS`, or
that of `MODULES`.
"""
MODULES = {
    "top": "status", "up": "cluster",
    "model": "models.model", "train": "models.train", "compile": "models.compile",
    "credential": "trust.credential", "signer": "trust.signer", "enrol": "trust.signer",
    "certificates": "trust.certificates",
    "bench": "measure.bench", "eval": "measure.eval", "conformance": "measure.conformance",
    "simulate": "measure.simulate", "plan": "measure.plan", "trace": "measure.trace",
    "profile": "measure.profile", "tune": "measure.tune",
}  # fmt: skip
"""The first words whose commands are in a room, or in the module of another word."""

EXIT_CODES = {
    0: "done",
    1: "the command failed: there is no room, a worker was lost, or a check failed",
    2: "a flag, a file or a checkpoint is wrong; nothing was started",
    3: "nobody answers at the address of a server, a cluster or a signer",
    4: "a server, a cluster, a node or a signer refuses the key or the credential",
    130: "Ctrl-C; a command that serves lets running requests finish, and exits with 0",
    141: "the program that read the output ended",
}
"""What the exit codes of all commands mean."""


def commands_of(word: str) -> tuple[Command, ...]:
    """Return the commands whose first word is `word`; imports what they need to be parsed."""
    module = importlib.import_module(f"mooncake.cli.{MODULES.get(word, word)}")
    commands: tuple[Command, ...] = module.COMMANDS
    return tuple(
        dataclasses.replace(each, summary=each.summary or SUMMARIES[word])
        for each in commands
        if each.words.split()[0] == word
    )


def describe() -> list[Command]:
    """Return all commands."""
    return [command for word in SUMMARIES for command in commands_of(word)]
