"""Campaigns: many inputs, each drawn by hypothesis from a seed, until one shows a fault.

*Session*: the sans-IO session alone, the dispatcher's and those of clients. *Beside work*:
strangers and producers on a real dispatcher whose good producer and ranks work meanwhile. *As
ranks*: peers that may begin generations, which is no attack; afterwards a good group trains all
that was pushed meanwhile. *About stores*: as beside work, where payloads may come by reference, and
whoever says that he opens payload stores is asked to release objects.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from rollout_dispatcher.protocol import messages as m
from tests.fuzz.arena import DP_SIZE, Arena, Work, arena, is_harmless
from tests.fuzz.inputs import FRAMES_ABOUT_STORES, streams
from tests.fuzz.session import check_session, client_inputs, inputs

#: Every so many inputs the good peers are asked for a sign of work.
ROUND = 100
#: Memory is compared from here on, as a share of the inputs, and may grow by so much.
WARM_UP, GROWTH_BYTES = 0.2, 8 << 20

PRODUCERS = (
    m.HelloProducer(client_id="fuzz"),
    m.HelloProducer(client_id="another"),
    m.HelloRank(client_id="fuzz", dp_rank=0, dp_size=DP_SIZE, generation=1),
    m.HelloRank(client_id="fuzz", dp_rank=1, dp_size=DP_SIZE + 1),
)
ABOUT_STORES = (
    m.HelloProducer(client_id="fuzz", incarnation="fuzz.1", opens_stores=True),
    m.HelloProducer(client_id="fuzz", incarnation="fuzz.2", opens_stores=True),
    m.HelloProducer(client_id="another", incarnation="another.1", opens_stores=True),
    m.HelloProducer(client_id="inline"),
)
RANKS = (
    m.HelloRank(client_id="fuzz", dp_rank=0, dp_size=DP_SIZE),
    m.HelloRank(client_id="another", dp_rank=0, dp_size=DP_SIZE, taken=5, committed=5),
    m.HelloRank(client_id="fuzz", dp_rank=1, dp_size=DP_SIZE, generation=2, received=[(0, 9)]),
)


def fuzz_session(examples: int, number: int) -> dict[str, object]:
    """So many inputs for the session; raises what they show."""
    _each(inputs, examples, number, lambda drawn: check_session(*drawn))
    return {"inputs": examples}


def fuzz_client_sessions(examples: int, number: int) -> dict[str, object]:
    """So many inputs for the sessions of clients; raises what they show."""
    _each(client_inputs, examples, number, lambda drawn: check_session(*drawn))
    return {"inputs": examples}


def fuzz_beside_work(
    folder: Path, examples: int, number: int, bug: str = "none"
) -> dict[str, object]:
    """So many connections beside good peers; raises what they show."""
    with arena(folder, bug) as target:
        return _beside_work(target, streams(PRODUCERS), examples, number)


def fuzz_about_stores(folder: Path, examples: int, number: int) -> dict[str, object]:
    """So many connections beside good peers of a dispatcher that takes references."""
    with arena(folder, references=True) as target:
        said = streams(ABOUT_STORES, FRAMES_ABOUT_STORES)
        found = _beside_work(target, said, examples, number, references=True)
        at: dict[str, Any] = target.status()
        return found | {"referenced": at["samples_referenced"], "released": at["objects"]["freed"]}


def fuzz_as_ranks(folder: Path, examples: int, number: int, bug: str = "none") -> dict[str, object]:
    """So many connections that may be ranks; raises what they show, then or afterwards."""
    with arena(folder, bug) as target:
        check = partial(_is_balanced, target)
        memory = _attack(target, streams(RANKS), examples, number, check, rank=True)
        work = Work(target)
        work.go_on()
        work.end()
    return {"inputs": target.attacks, "errors": target.codes} | memory


def _beside_work(
    target: Arena,
    said: st.SearchStrategy[bytes],
    examples: int,
    number: int,
    *,
    references: bool = False,
) -> dict[str, object]:
    work = Work(target)
    if references:
        work.push_references()
    work.go_on()
    memory = _attack(target, said, examples, number, work.go_on)
    work.go_on()
    work.end()
    return {"inputs": target.attacks, "errors": target.codes, "trained": len(work.trained)} | memory


def _attack(
    target: Arena,
    said: st.SearchStrategy[bytes],
    examples: int,
    number: int,
    check: Callable[[], None],
    *,
    rank: bool = False,
) -> dict[str, object]:
    warm = 0

    def one(stream: bytes) -> None:
        nonlocal warm
        assume(is_harmless(stream, rank=rank))
        target.attack(stream)
        if target.attacks % ROUND == 0:
            check()
        if not warm and target.attacks >= WARM_UP * examples:
            warm = target.resident

    _each(said, examples, number, one)
    grown = target.resident - warm
    assert grown <= GROWTH_BYTES, f"{grown >> 20} MiB more memory after {examples} inputs"
    return {"warm_mb": round(warm / 1e6, 2), "end_mb": round((warm + grown) / 1e6, 2)}


def _is_balanced(target: Arena) -> None:
    assert target.status()["balanced"]


def _each(
    strategy: st.SearchStrategy[Any], examples: int, number: int, one: Callable[[Any], None]
) -> None:
    """Generate and try; nothing is made smaller, since a dispatcher keeps what it was sent."""

    @seed(number)
    @settings(
        max_examples=examples,
        phases=[Phase.generate],
        database=None,
        report_multiple_bugs=False,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(drawn: Any) -> None:
        one(drawn)

    run()
