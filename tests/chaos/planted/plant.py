"""How bugs are planted.

Each breaks one promise, or forgets that one message may be lost or repeated. A bug is a function
that changes the classes of its process. What it changes is as public and as high up as can be, and
has to be there: a bug that is planted nowhere would never be caught.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from types import ModuleType
from typing import Any

from rollout_dispatcher.core.dispatch import DispatcherCore
from rollout_dispatcher.core.effects import Decision, Deliver, Effect
from rollout_dispatcher.core.facts import Fact
from rollout_dispatcher.core.steps.rank_state import RankHello
from rollout_dispatcher.service.barrier import DurabilityBarrier

Bug = Callable[[], None]
BUGS: dict[str, Bug] = {}


def planted(bug: Bug) -> Bug:
    """Make it known under its name, with dashes."""
    BUGS[bug.__name__.replace("_", "-")] = bug
    return bug


def plant(owner: type | ModuleType, name: str, method: Callable[..., object]) -> None:
    """Put a method, or a function of a module, in the place of one that is there."""
    assert hasattr(owner, name), f"{owner.__name__} has no {name} any more: plant elsewhere"
    given = signature(getattr(owner, name)).parameters.values()
    named = {item.name: None for item in given if item.kind is item.KEYWORD_ONLY}
    signature(method).bind(*[item for item in given if item.name not in named], **named)
    setattr(owner, name, method)


def forget_facts(*kinds: str) -> None:
    note = DurabilityBarrier.note

    def selective(
        barrier: DurabilityBarrier, facts: Sequence[Fact], totals: Mapping[str, object]
    ) -> None:
        note(barrier, [fact for fact in facts if type(fact).__name__ not in kinds], totals)

    plant(DurabilityBarrier, "note", selective)


def mishear_hello(**values: Any) -> None:
    join = DispatcherCore.join

    def mishearing(core: DispatcherCore, hello: RankHello, now: float) -> Any:
        return join(core, replace(hello, **values), now)

    plant(DispatcherCore, "join", mishearing)


def redeliver(change: Callable[[RankHello, Deliver], Deliver | None]) -> None:
    """Change what a rank is given that comes back."""
    join = DispatcherCore.join

    def changing(core: DispatcherCore, hello: RankHello, now: float) -> Decision:
        back = core.client_of(hello.dp_rank) == hello.client_id
        decision = join(core, hello, now)
        effects: list[Effect] = []
        for effect in decision.effects:
            changed = change(hello, effect) if back and isinstance(effect, Deliver) else effect
            effects += [] if changed is None else [changed]
        return replace(decision, effects=effects)

    plant(DispatcherCore, "join", changing)
