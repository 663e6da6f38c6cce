"""Whatever the core notes, a new process is told exactly what it adds up to."""

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from tests.journal.player import Player
from tests.journal.support import OFF, as_if_killed, opened, plain
from tests.support.examples import examples

#: How often a run is closed in order, or killed, after each of its stretches.
STRETCHES = st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=4)


@examples(120)
@given(seed=st.integers(0, 2**32), stretches=STRETCHES, horizon=st.integers(0, 8))
def test_what_is_remembered_is_what_the_facts_add_up_to(
    seed: int, stretches: list[tuple[int, bool]], horizon: int
) -> None:
    player = Player(Random(seed), horizon)
    with TemporaryDirectory() as scratch:
        directory = Path(scratch) / "0"
        for number, (batches, killed) in enumerate([*stretches, (0, False)]):
            with opened(directory, OFF, id_horizon=horizon) as (journal, listener, remembered):
                if number:
                    assert plain(remembered) == plain(player.model.remembered())
                for _ in range(batches):
                    listener.wait(journal.append(*player.batch()))
                for ticket, payload in player.model.payloads().items():
                    assert journal.fetch(ticket) == payload
                if killed:
                    following = Path(scratch) / f"{number + 1}"
                    as_if_killed(directory, following)
            directory = following if killed else directory
