"""The core is silent after each event: nothing that can be done is left undone.

An event is decided to its end when telling the core nothing new, at the same time, changes nothing.
Otherwise something waits for an event that may never come.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import Decision
from tests.support.examples import scaled

#: How many random sequences each state machine tries where the usual number is not enough.
SEQUENCES = "DISPATCHER_SEQUENCES"


def sequences(usual: int, *, steps: int) -> settings:
    """So many random sequences of so many events, or as many as `DISPATCHER_SEQUENCES` says."""
    count = int(os.environ.get(SEQUENCES, scaled(usual)))
    phases = [phase for phase in Phase if phase is not Phase.explain]  # that takes minutes
    return settings(
        max_examples=count, stateful_step_count=steps, deadline=None, phases=phases, print_blob=True
    )


#: Of a counterexample nothing is seen before it is shrunk, which takes five minutes at most; and
#: whoever asks for more sequences has the time.
SHRINKING = pytest.mark.timeout(0 if SEQUENCES in os.environ else 600)


def is_due(core: DispatcherCore, now: float) -> bool:
    """Whether `tick` is wanted at once."""
    deadline = core.next_deadline()
    return deadline is not None and deadline <= now


def assert_silent(core: DispatcherCore, now: float) -> None:
    """Tell the core nothing new, in several ways; nothing is due."""
    before = _seen(core, now)
    for said, decision in _nothing_new(core, now):
        found = [*decision.effects, *decision.facts]
        assert not found, f"{said} is news, {core.waits_for(now)}: {found}"
    assert _seen(core, now) == before, "what is nothing new changes what can be seen"
    decision = core.journal_takes_more(now)  # looks at everybody again who was held back
    found = [*decision.effects, *decision.facts]
    assert not found, f"somebody could have come in: {found}"


def _nothing_new(core: DispatcherCore, now: float) -> Iterator[tuple[str, Decision]]:
    yield "a tick", core.tick(now)
    generation = core._ledger.generation
    for dp_rank, rank in list(core._ledger.ranks.items()):
        if generation.failed is None and rank.ready:
            said = core.demand(dp_rank, rank.taken, now, hungry=rank.hungry)
            yield f"the demand of DP rank {dp_rank}", said
            yield f"the commit of DP rank {dp_rank}", core.commit(dp_rank, rank.committed, now)


def _seen(core: DispatcherCore, now: float) -> object:
    """The state, as far as anybody can see it and it is soon looked up."""
    buffer, parts = core._buffer, core._parts
    return (
        len(buffer), buffer.ready_units, buffer.removals, len(core._admission.blocked),
        core._lifecycle.state, parts.ends.num_pending, parts.phases.units_short(),
        core.reasons(now), core.next_deadline(),
    )  # fmt: skip
