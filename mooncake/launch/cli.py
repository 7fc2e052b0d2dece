"""The `mooncake` command: parses words, calls one function each; imports what is heavy only then.

Every error raised on purpose becomes one line on stderr and exit code 2; Ctrl-C ends with 130.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import mooncake
from mooncake.base import ConfigError, MooncakeError
from mooncake.launch import bench, options, pool_tool, simulate
from mooncake.launch.config import resolve, unknown_setting
from mooncake.launch.settings import ServeConfig

EXTRAS = {
    "fastapi": "api", "httptools": "api", "httpx": "api", "pydantic": "api", "ray": "ray",
    "starlette": "api", "uvicorn": "api", "uvloop": "api",
}  # fmt: skip
"""Packages that not every installation has -> the extra that brings them."""

DEFAULT_URL = "http://127.0.0.1:8000"

SERVE_EXAMPLES = """examples:
  mooncake serve checkpoints/k2-small                        1 prefill, 1 decode, 1 kvstore worker
  mooncake serve checkpoints/k2-small --prefill 2 --decode 2 --slo-ttft-s 5
  mooncake serve checkpoints/k2-small --colocated            one process, no Ray
  mooncake serve --config cluster.yaml --port 9000           keys are the flags' names
  mooncake serve --role prefill --join 10.0.0.7:6379         one more worker for a running cluster
  mooncake serve --role gateway --join 10.0.0.7:6379         one more door to it
  mooncake serve checkpoints/k2-small --role kvstore --dram 100GiB --ssd /mnt/nvme0:2TiB
  mooncake serve checkpoints/k2-small --dry-run              what would be started, and its memory
  mooncake serve --check                                     each kernel against its reference here
"""
INIT_EXAMPLES = """examples:
  mooncake model init --preset k2-small --seed 0 --out checkpoints/k2-small
"""
CONVERT_EXAMPLES = """examples:
  mooncake model convert checkpoints/k2-small --to fp8 --out checkpoints/k2-small-fp8
  mooncake model convert checkpoints/k2-small --to int4 --out checkpoints/k2-small-int4
"""
PROFILE_EXAMPLES = """examples:
  mooncake profile checkpoints/k2-small
  mooncake profile checkpoints/k2-small --num-threads 2 --out this-machine.json --json
"""
TUNE_EXAMPLES = """examples:
  mooncake tune --split tp8 --format int4
  mooncake tune --split ep16 --format fp8 --format int4
"""
STATUS_EXAMPLES = """examples:
  mooncake status
  mooncake status --json | jq '.workers[].pid'
"""
CHAT_EXAMPLES = """examples:
  mooncake chat
  mooncake chat --url http://10.0.0.7:8000 --max-tokens 300 --system "You answer in one sentence."
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are our errors, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    try:
        parser = _parser()
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:
            raise ConfigError(_about_unknown(unknown[0], arguments))
        act: Callable[[argparse.Namespace], int] = arguments.act
        return act(arguments)
    except MooncakeError as error:
        print(f"mooncake: {error.message}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        print(
            f"mooncake: {error.name} is not installed: pip install 'mooncake[{extra}]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone; say nothing more to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _about_unknown(word: str, arguments: argparse.Namespace) -> str:
    if not word.startswith("-"):
        return f"{word!r} is one argument too many"
    if arguments.act is _serve:
        return unknown_setting(word)
    return f"unknown option {word}"


# ---------------------------------------------------------------- the commands


def _serve(arguments: argparse.Namespace) -> int:
    from mooncake.launch import serve

    known = options.options_of(ServeConfig)
    given = {name: value for name, value in vars(arguments).items() if name in known}
    if arguments.check:
        from mooncake.launch import kernel_tools

        return kernel_tools.check()
    config = resolve(given, arguments.config, os.environ)
    if arguments.dry_run:
        return serve.dry_run(config)
    return serve.serve(config)


def _model_init(arguments: argparse.Namespace) -> int:
    from mooncake.launch import model_files

    return model_files.init(
        arguments.preset, options.count(0)("seed", arguments.seed), arguments.out
    )


def _model_convert(arguments: argparse.Namespace) -> int:
    from mooncake.launch import model_files

    return model_files.convert(arguments.model, arguments.to, arguments.out)


def _profile(arguments: argparse.Namespace) -> int:
    from mooncake.launch import profile_tool

    known = options.options_of(ServeConfig)
    return profile_tool.run(
        arguments.model,
        {
            name: value
            for name, value in vars(arguments).items()
            if name in known and name != "model"
        },
        repeats=options.count(1)("repeats", arguments.repeats),
        out=arguments.out,
        as_json=arguments.json,
    )


def _tune(arguments: argparse.Namespace) -> int:
    from mooncake.launch import kernel_tools

    return kernel_tools.tune(arguments.split, arguments.format or kernel_tools.FORMATS)


def _status(arguments: argparse.Namespace) -> int:
    from mooncake.launch import status

    return status.show(arguments.url, _key(arguments), as_json=arguments.json)


def _chat(arguments: argparse.Namespace) -> int:
    from mooncake.launch import chat

    wishes = chat.Wishes(
        model=arguments.model,
        system=arguments.system,
        max_tokens=options.count(1)("max_tokens", arguments.max_tokens),
        temperature=arguments.temperature,
    )
    return chat.talk(arguments.url, _key(arguments), wishes)


def _version(_: argparse.Namespace) -> int:
    print(_version_line())
    return 0


def _version_line() -> str:
    return f"mooncake {mooncake.__version__}, Python {sys.version.split()[0]}"


def _key(arguments: argparse.Namespace) -> str | None:
    return arguments.api_key or os.environ.get("MOONCAKE_API_KEY")


# ---------------------------------------------------------------- the words


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mooncake",
        description="Serve Kimi-K2 from separate prefill, decode and KVCache pool workers.",
        epilog="`mooncake COMMAND --help` has the flags and examples of each command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", "-V", action="version", version=_version_line())
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", dest="command"
    )
    _add_serve(commands)
    model = _command(
        commands, "model", "work with checkpoints", None, INIT_EXAMPLES + CONVERT_EXAMPLES[10:]
    )
    model_commands = model.add_subparsers(title="commands", required=True, metavar="COMMAND")
    init = _command(
        model_commands, "init", "write a checkpoint with random weights", _model_init, INIT_EXAMPLES
    )
    init.add_argument(
        "--preset", required=True, metavar="NAME", help="k2-nano, k2-tiny or k2-small"
    )
    init.add_argument("--seed", default="0", metavar="N", help="of the weights (default: 0)")
    init.add_argument(
        "--out", required=True, metavar="DIR", help="a directory that is not there yet"
    )
    _add_convert(model_commands)
    tune = _command(
        commands, "tune", "measure kernel configurations on this GPU", _tune, TUNE_EXAMPLES
    )
    tune.add_argument(
        "--split", default="tp8", metavar="NAME",
        help="how K2's experts are split: tp8, tp16 or ep16 (default: tp8)",
    )  # fmt: skip
    tune.add_argument(
        "--format", action="append", metavar="NAME", help="plain, fp8 or int4 (default: all)"
    )
    profile = _command(
        commands, "profile", "time an engine's steps here and fit the cost model", _profile,
        PROFILE_EXAMPLES,
    )  # fmt: skip
    profile.add_argument("model", metavar="DIR", help="the checkpoint")
    for name in ("dtype", "max-model-len", "max-num-seqs", "max-num-batched-tokens", "num-threads",
                 "kv-cache-memory-bytes", "device"):  # fmt: skip
        profile.add_argument(
            f"--{name}", default=argparse.SUPPRESS, metavar="VALUE", help="as of `mooncake serve`"
        )
    profile.add_argument("--repeats", default="3", metavar="N", help="of each step (default: 3)")
    profile.add_argument("--out", metavar="FILE", help="write the samples and the fit there")
    profile.add_argument("--json", action="store_true", help="print what --out writes")
    status = _command(commands, "status", "workers, pool and load", _status, STATUS_EXAMPLES)
    _add_server(status)
    status.add_argument("--json", action="store_true", help="print what the server answers")
    chat = _command(commands, "chat", "talk to a server in the terminal", _chat, CHAT_EXAMPLES)
    _add_server(chat)
    chat.add_argument("--model", metavar="NAME", help="default: the server's first model")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.add_argument(
        "--max-tokens", default="512", metavar="N", help="of an answer (default: 512)"
    )
    chat.add_argument("--temperature", type=float, metavar="T", help="default: the model's")
    pool_tool.add(commands, _command)
    bench.add(commands, _command)
    simulate.add(commands, _command)
    _command(commands, "version", "print the version", _version, "examples:\n  mooncake version\n")
    return parser


def _add_serve(commands: argparse._SubParsersAction[_Parser]) -> None:
    serve = _command(commands, "serve", "serve a checkpoint", _serve, SERVE_EXAMPLES)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, (option, default) in options.options_of(ServeConfig).items():
        group = groups.get(option.group)
        if group is None:
            group = groups[option.group] = serve.add_argument_group(option.group)
        text = option.text if default in (None, (), "") else f"{option.text} (default: {default})"
        if option.positional:
            group.add_argument(
                name, nargs="?", default=argparse.SUPPRESS, metavar=option.metavar, help=option.text
            )
        elif option.switch:
            group.add_argument(
                f"--{options.flag(name)}", dest=name, default=argparse.SUPPRESS,
                action=argparse.BooleanOptionalAction, help=text,
            )  # fmt: skip
        else:
            names = [f"--{options.flag(name)}", *([option.short] if option.short else [])]
            group.add_argument(
                *names, dest=name, default=argparse.SUPPRESS, metavar=option.metavar,
                action="append" if option.repeat else "store", help=text.replace("%", "%%"),
            )  # fmt: skip
    serve.add_argument("--config", metavar="FILE", help="YAML file with any of these settings")
    serve.add_argument(
        "--dry-run",
        action="store_true",
        help="print the configuration and memory plan, start nothing",
    )
    serve.add_argument(
        "--check",
        action="store_true",
        help="compare each kernel with its reference on this machine, start nothing",
    )


def _add_convert(commands: argparse._SubParsersAction[_Parser]) -> None:
    convert = _command(
        commands, "convert", "write a quantized copy", _model_convert, CONVERT_EXAMPLES
    )
    convert.add_argument("model", metavar="DIR", help="a checkpoint that is not quantized")
    convert.add_argument(
        "--to", required=True, metavar="FORMAT",
        help="fp8 (blocks of 128 x 128, as K2-Instruct) or int4 (groups of 32, as K2-Thinking)",
    )  # fmt: skip
    convert.add_argument(
        "--out", required=True, metavar="DIR", help="a directory that is not there yet"
    )


def _add_server(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url", default=DEFAULT_URL, help=f"of the server (default: {DEFAULT_URL})"
    )
    command.add_argument(
        "--api-key", metavar="KEY", help="if it asks for one (env MOONCAKE_API_KEY)"
    )


def _command(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    text: str,
    act: Callable[[argparse.Namespace], int] | None,
    examples: str,
) -> _Parser:
    command = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    if act is not None:
        command.set_defaults(act=act)
    return command


if __name__ == "__main__":
    main()
