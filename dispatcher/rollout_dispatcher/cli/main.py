"""The `dispatcher` command: runs the subcommand and turns its errors into exit codes.

Exit codes: 0 done or drained, 1 runtime failure, 2 usage or config. Each error is one line on
stderr; a traceback means a bug.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from rollout_dispatcher import __version__
from rollout_dispatcher.errors import ConfigError, DispatcherError
from rollout_dispatcher.hints import nearest, to_install

OK, FAILURE, USAGE = 0, 1, 2

#: Subcommand -> (module, its function of argv, one line of help). Modules load on use.
COMMANDS = {
    "serve": ("serve", "run", "run the dispatcher beside your trainers"),
    "check-config": ("serve", "check", "show the config that serve would use, and its sources"),
    "wait-ready": ("ask", "run", "wait until a dispatcher serves (for scripts and probes)"),
    "top": ("top", "run", "watch a running dispatcher on a terminal"),
    "simulate": (
        "simulate",
        "run",
        "show on a trace or a record what each window would give",
    ),
    "calibrate": ("recorded", "calibrate", "say what samples cost, from what micro-batches took"),
    "report": ("recorded", "report", "make an HTML page of a recorded run"),
    "demo": (
        "demo.command",
        "run",
        "train for real on this machine, once a strategy, and compare",
    ),
}

HELP = """usage: dispatcher COMMAND [options]

Buffers finished RL rollouts and streams balanced micro-batches to data-parallel trainers.

commands:
{commands}

Try it:    dispatcher demo
Run it:    dispatcher serve --dp-size 8 --global-batch-size 512 --micro-batch-tokens 32768
Options:   dispatcher COMMAND --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args:
        print(_help(), end="", file=sys.stderr)
        return USAGE
    name, rest = args[0], args[1:]
    try:
        code = _run(name, rest)
        _flush_output()
        return code
    except ConfigError as error:
        for problem in error.problems:
            print(f"dispatcher: {problem}", file=sys.stderr)
        return USAGE
    except ModuleNotFoundError as error:  # the base installation is that of clients
        if (remedy := to_install(error)) is None:
            raise
        print(f"dispatcher: {name} {remedy}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # `dispatcher ... | head`: the reader has seen enough
        _discard_output()
        return OK
    except (DispatcherError, OSError) as error:
        print(f"dispatcher {name}: {error}", file=sys.stderr)
        return FAILURE
    except KeyboardInterrupt:
        return 128 + 2


def _flush_output() -> None:
    """Raises OSError if it cannot be written, which the interpreter may not report at its exit."""
    try:
        print(end="", flush=True)
    except OSError:
        _discard_output()
        raise


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(name: str, argv: list[str]) -> int:
    if name in {"-h", "--help"}:
        print(_help(), end="")
        return OK
    if name == "--version":
        print(f"dispatcher {__version__}")
        return OK
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        raise ConfigError(f"unknown {kind} {name}{nearest(name, COMMANDS)}; see dispatcher --help")
    module, function, _ = COMMANDS[name]
    code: int = getattr(import_module(f"rollout_dispatcher.cli.{module}"), function)(argv)
    return code


def _help() -> str:
    lines = (f"  {name:<14}{summary}" for name, (*_, summary) in COMMANDS.items())
    return HELP.format(commands="\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
