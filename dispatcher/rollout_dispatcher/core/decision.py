"""A decision: all that follows from one thing that the core was told.

Facts and effects come together, so that nobody performs the ones and forgets the others: what an
effect tells the world rests on the facts beside it. Invariant: a fact is in one decision, the first
one that is returned after it was noted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rollout_dispatcher.core.effects import Effect
from rollout_dispatcher.core.facts import Fact

#: What there is to keep where there are no facts.
NO_TOTALS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Decision:
    """Make `facts` durable, with `totals`; behind them perform `effects`, in this order.

    totals: the run's counters with these facts, as JSON can hold them; empty without facts, as in
    every decision of a core whose facts nobody keeps.
    """

    effects: Sequence[Effect]
    facts: Sequence[Fact]
    totals: Mapping[str, object]


#: Nothing follows, as most of the time.
NOTHING = Decision((), (), NO_TOTALS)
