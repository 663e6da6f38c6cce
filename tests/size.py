"""How large the product is, in one table: lines of code, modules, constants, flags, a sample's way.

    python -m tests.size [--json]
    python -m tests.size --way

A line of code has code on it: no blank lines, comments or docstrings. A literal is an int or float
in the syntax tree, but for -1, 0, 1 and 2. The way of one sample is counted by `sys.setprofile` in
every thread of a process that has a dispatcher, a producer and a trainer of one DP rank, once they
are warm: calls of the product's own functions, comprehensions not counted (Python 3.11 calls them),
nor coroutines that go on; a change of file is a call from another file than the call before. The
counts are medians of several samples, as timers and threads join in. *Pushed to committed* is from
`RolloutProducer.push` until the commit has been answered; *push, decided* from there until the core
has decided on the push, with nobody there who trains. `--way` prints the first of the two instead,
call by call, each below whoever called it.
"""

import argparse
import ast
import asyncio
import io
import json
import statistics
import sys
import threading
import tokenize
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from threading import get_ident
from time import sleep
from types import CodeType, FrameType
from typing import Any

from rollout_dispatcher import Dispatcher, ServeConfig
from rollout_dispatcher.cli.options import themes
from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_workers import MicroBatchStream, RolloutProducer
from tests.support.source import ROOT

PLANNER = ROOT / "dispatcher" / "rollout_planner"
ROOTS = (
    ROOT / "dispatcher" / "rollout_dispatcher",
    PLANNER,
    ROOT / "workers" / "rollout_workers",
)
PLAIN = (-1, 0, 1, 2)
NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
#: A push is decided once this has returned.
DECIDES = DispatcherCore.push.__code__
SAMPLES, QUIET_S = 9, 0.05
ONE_AT_A_TIME = {
    "dp_size": 1,
    "global_batch_size": 1,
    "micro_batch_size": 1,
    "window": 1,
    "buffer_capacity": 100,
    "listen": ["127.0.0.1:0"],
    "http": "127.0.0.1:0",
}


def modules(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def lines_of_code(text: str) -> int:
    """Lines that have code on them."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        match node:
            case (
                ast.Module(body=[first, *_])
                | ast.ClassDef(body=[first, *_])
                | ast.FunctionDef(body=[first, *_])
                | ast.AsyncFunctionDef(body=[first, *_])
            ) if _is_text(first):
                lines.difference_update(range(first.lineno, (first.end_lineno or 0) + 1))
    return len(lines)


def _is_text(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def literals(text: str) -> int:
    """Numbers written in the code, but for the plainest; a sign belongs to its number."""
    tree = ast.parse(text)
    signed = {
        id(node.operand): -node.operand.value
        for node in ast.walk(tree)
        if isinstance(node, ast.UnaryOp)
        and isinstance(node.op, ast.USub)
        and isinstance(node.operand, ast.Constant)
        and isinstance(node.operand.value, int | float)
    }
    values = [
        signed.get(id(node), node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float)
    ]
    return sum(value not in PLAIN for value in values)


def of_packages() -> dict[str, tuple[int, int]]:
    """Lines of code and modules, by package directly below a source root."""
    found: dict[str, tuple[int, int]] = {}
    for root in ROOTS:
        for path in modules(root):
            first = path.relative_to(root).parts[0]
            name = f"{root.name}/{'' if first.endswith('.py') else first}".rstrip("/")
            lines, files = found.get(name, (0, 0))
            found[name] = lines + lines_of_code(path.read_text()), files + 1
    return found


def flags() -> int:
    """Options of `dispatcher serve`; a switch with its opposite is one."""
    flags = themes(ServeConfig, advanced=False).values()
    return sum(map(len, flags)) + 2  # and --config, --set


# -- the way of a sample


class Calls:
    """Calls of the product's functions, in all threads that start from here on.

    draws: whether it is noted too who called each.
    """

    def __init__(self, *, draws: bool = False) -> None:
        self.on = False
        self.seen: list[tuple[str, str]] = []
        self._draws = draws
        #: Of each call its thread, and how many others it is below.
        self._places: list[tuple[str, int]] = []
        self._known: dict[CodeType, tuple[str, str] | None] = {}
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def stop(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def until_quiet(self) -> dict[str, int]:
        """What was called since `on`, once nothing more is for a while."""
        sys.setprofile(None)
        known = -1
        while known != len(self.seen):
            known = len(self.seen)
            sleep(QUIET_S)
        self.on = False
        sys.setprofile(self._note)
        files = [file for file, _ in self.seen]
        changes = sum(one != other for one, other in pairwise(files))
        return {
            "calls": len(files),
            "functions": len(set(self.seen)),
            "files": len(set(files)),
            "changes_of_file": changes,
        }

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if not self.on or (self.alone is not None and get_ident() != self.alone):
            return
        code = frame.f_code
        if event == "return" and code is DECIDES and self.alone is not None:
            self.on = False
        if event != "call":
            return
        if (known := self._name(code)) is None:
            return
        self.seen.append(known)
        if self._draws:
            callers, depth = frame.f_back, 0
            while callers is not None:
                depth += self._name(callers.f_code) is not None
                callers = callers.f_back
            self._places.append((threading.current_thread().name, depth))

    def _name(self, code: CodeType) -> tuple[str, str] | None:
        """File and name of a function that counts."""
        if code not in self._known:
            ours = code.co_filename.startswith(tuple(f"{root}/" for root in ROOTS))
            counts = ours and not code.co_name.endswith(COMPREHENSIONS)
            self._known[code] = (code.co_filename, code.co_qualname) if counts else None
        return self._known[code]

    def drawn(self) -> Iterator[str]:
        """What was called since `begin`, call by call, with a line wherever threads alternate."""
        before = ""
        for (file, name), (thread, depth) in zip(self.seen, self._places, strict=True):
            if thread != before:
                yield f"-- {thread}"
                before = thread
            yield f"{'  ' * depth}{name}  {Path(file).relative_to(ROOT)}"

    def begin(self, alone: int | None = None) -> None:
        """Count from here on. alone: in this thread only, and until it has decided on a push."""
        self.alone = alone
        self.seen, self._places = [], []
        self.on = True


def ways() -> dict[str, dict[str, int]]:
    """Calls, functions, files and changes of file: of one sample, and of one push alone."""
    calls = Calls()
    try:
        commits, pushes = asyncio.run(_counted(calls, trains=True)), asyncio.run(_counted(calls))
    finally:
        calls.stop()
    return {"pushed to committed": _medians(commits), "arrived to decided": _medians(pushes)}


def way() -> Iterator[str]:
    """One sample, pushed to committed, call by call."""
    calls = Calls(draws=True)
    try:
        asyncio.run(_counted(calls, trains=True))
    finally:
        calls.stop()
    return calls.drawn()


def _medians(figures: list[dict[str, int]]) -> dict[str, int]:
    warm = figures[len(figures) // 3 :]
    return {name: int(statistics.median(each[name] for each in warm)) for name in warm[0]}


async def _counted(calls: Calls, *, trains: bool = False) -> list[dict[str, int]]:
    """What each of some samples takes; clients have threads of their own, as in a trainer."""
    async with Dispatcher(ServeConfig.model_validate(ONE_AT_A_TIME)) as dispatcher:
        alone = None if trains else get_ident()
        return await asyncio.to_thread(_push, calls, dispatcher.endpoint, alone)


def _push(calls: Calls, endpoint: str, alone: int | None) -> list[dict[str, int]]:
    found = []
    with ExitStack() as stack:
        producer = stack.enter_context(RolloutProducer(endpoint))
        if alone is None:
            trainer = threading.Thread(target=_train, args=(endpoint,))
            stack.callback(trainer.join)
            stack.callback(producer.end_stream)
            trainer.start()
        for _ in range(SAMPLES):
            calls.begin()
            calls.until_quiet()  # the trainer waits for a step
            calls.begin(alone)
            producer.push({"input_ids": [*range(8)], "loss_mask": [True] * 8})
            found.append(calls.until_quiet())
    return found


def _train(endpoint: str) -> None:
    with MicroBatchStream(endpoint, dp_rank=0, dp_size=1) as stream:
        for step in stream:
            for micro_batch in step:
                assert micro_batch.num_samples
            step.commit()


# -- the table


def measured(*, counts_calls: bool = True) -> dict[str, Any]:
    """Everything, by name."""
    files = [path for root in ROOTS for path in modules(root)]
    lines = [lines_of_code(path.read_text()) for path in files]
    tests = modules(ROOT / "tests")
    return {
        "packages": of_packages(),
        "lines_of_code": sum(lines),
        "modules": {
            "count": len(files),
            "median_lines": statistics.median(lines),
            "of_at_most_20_lines": sum(each <= 20 for each in lines),
            "above_400_lines": sum(each > 400 for each in lines),
        },
        "literals_in_planner": sum(literals(path.read_text()) for path in modules(PLANNER)),
        "flags_of_serve": flags(),
        "lines_of_tests": {
            "test_*.py": sum(_lines(path) for path in tests if path.name.startswith("test_")),
            "all": sum(map(_lines, tests)),
        },
        "a_sample": ways() if counts_calls else {},
    }


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def table(found: dict[str, Any]) -> Iterator[str]:
    """As it is printed; what belongs together is indented."""
    yield f"{'package':<44}{'lines of code':>14}{'modules':>9}"
    for name, (lines, files) in sorted(found["packages"].items()):
        yield f"{name:<44}{lines:>14,}{files:>9,}"
    yield f"{'both source roots':<44}{found['lines_of_code']:>14,}"
    yield ""
    for name, value in found.items():
        if name not in ("packages", "lines_of_code", "a_sample"):
            for part, number in (value if isinstance(value, dict) else {"": value}).items():
                yield f"{f'{name} {part}'.replace('_', ' ').strip():<44}{number:>14,}"
    for name, value in found["a_sample"].items():
        counts = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in value.items())
        yield f"one sample, {name}: {counts}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.size", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--way", action="store_true", help="print the way of a sample instead")
    options = parser.parse_args()
    if options.way:
        print("\n".join(way()))
        return
    found = measured()
    print(json.dumps(found, indent=1) if options.json else "\n".join(table(found)))


if __name__ == "__main__":
    main()
