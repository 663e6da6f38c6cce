"""A campaign of scripts: each in a world of its own, on one event loop whose time is virtual."""

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager

from tests.fuzz.order.line import VirtualLoop
from tests.fuzz.order.script import play, shortened, write


def fuzz_order(examples: int, number: int, *, shorten: bool = False) -> dict[str, object]:
    """So many scripts; raises what one shows, with the script, made shorter if that is wanted."""
    words = 0
    with _quiet(), _loop() as loop:
        for at in range(examples):
            script = write(random.Random(f"{number}/{at}"))
            words += len(script[1])
            try:
                play(loop, script)
            except Exception as error:
                error.add_note(f"script {at} of seed {number}: {script}")
                if shorten:
                    error.add_note(f"shorter: {shortened(script)}")
                raise
    return {"inputs": examples, "words": words}


@contextmanager
def _loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    try:
        yield loop
    finally:
        loop.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Peers that say nonsense are logged, each of them, and there are many."""
    log = logging.getLogger("rollout_dispatcher")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)
