"""Steady arrivals: the window is full whenever a step is planned, as with generous producers.

Each turn the ranks commit the step before, the window is refilled to `floor(W * B)` samples, then
the ranks ask for the next step. The clock counts turns. Steps with negative numbers are the
warm-up, in which the window ages as far as it will.
"""

from collections.abc import Callable, Iterable

from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.simulate.epochs import Unit
from rollout_dispatcher.simulate.replay.virtual import Setting, VirtualDispatch, VirtualStep
from rollout_planner.types import Oversize, PlanConfig

#: Nobody waits out bounds on skips that are larger than this.
MOST_WARM_UP_STEPS = 200


def warm_up_steps(setting: Setting) -> int:
    """Steps until the window has aged as far as it will.

    A sample stays for at most `max_skips + 1` steps, so after that many nothing is left that the
    empty start has shaped, and after as many again neither is what was chosen beside it. Without
    a choice every step is like the first.
    """
    config = setting.plan
    if setting.core.trigger.window <= setting.core.trigger.batch:
        return 0
    bound = max(config.max_skips, config.outlier_max_skips or 0)
    return min(2 * (bound + 1), MOST_WARM_UP_STEPS)


def run_steady(
    setting: Setting,
    arrivals: Iterable[Unit],
    steps: int,
    on_step: Callable[[VirtualStep], None],
    core_ranks: int = 1,
) -> None:
    """Plan the warm-up and `steps` steps more; `on_step` is told of every one, from 0 on."""
    virtual = VirtualDispatch(setting, on_step, core_ranks)
    refill = _Refill(virtual, setting, arrivals)
    refill()
    virtual.join()
    for turn in range(1, warm_up_steps(setting) + steps):
        step = virtual.released.popleft()
        virtual.commit(step)
        virtual.now = float(turn)
        refill()
        virtual.demand(step, hungry=True)


class _Refill:
    """Pushes samples, whole groups where they matter, until the window is full."""

    def __init__(
        self, virtual: VirtualDispatch, setting: Setting, arrivals: Iterable[Unit]
    ) -> None:
        self._virtual = virtual
        self._window = setting.core.trigger.window
        self._groups_matter = setting.core.groups_matter
        self._longest, self._micro_batch = (
            longest_kept(setting.plan),
            setting.core.limits.micro_batch,
        )
        self._arrivals = iter(arrivals)
        self._next: Unit = ()

    def __call__(self) -> None:
        room = self._window - self._virtual.core.statistics().buffered
        if not self._groups_matter:
            samples = [self._fetch()[0] for _ in range(room)]
            self._virtual.push(samples, may_hold=False)
            return
        # The group that does not fit is pushed too: so the core learns that the window is full.
        while room > 0:
            self._next = self._next or self._fetch()
            if not self._virtual.push(self._next, may_hold=False):
                break
            room -= len(self._next)
            self._next = ()

    def _fetch(self) -> Unit:
        for unit in self._arrivals:
            if not self._is_dropped(unit):
                return unit
            self._virtual.drop(unit, str(DropReason.OVERSIZE))
        raise AssertionError("epochs do not end")

    def _is_dropped(self, unit: Unit) -> bool:
        if self._longest is None:
            return False
        longest = max(item.tokens for item in unit)
        return longest > self._longest or (
            self._micro_batch.drops and self._micro_batch.too_long(unit)
        )


def longest_kept(config: PlanConfig) -> int | None:
    """Tokens beyond which samples are dropped, with their groups; None if none is."""
    return config.longest_in_budget if config.oversize is Oversize.DROP else None
