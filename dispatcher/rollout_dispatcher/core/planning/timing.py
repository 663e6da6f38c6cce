"""When to plan: what the trigger has to know of the run, some of it remembered from before."""

import math

from rollout_dispatcher.core.admission.admission import Admission
from rollout_dispatcher.core.buffer.open_groups import OpenGroups
from rollout_dispatcher.core.buffer.phases import Phases
from rollout_dispatcher.core.lifecycle import Lifecycle
from rollout_dispatcher.core.planning.trigger import Decided, Situation, TriggerConfig, Wait, decide


class Timing:
    """Asks the trigger."""

    def __init__(
        self,
        config: TriggerConfig,
        groups: OpenGroups,
        phases: Phases,
        admission: Admission,
        lifecycle: Lifecycle,
    ) -> None:
        self.config, self._groups, self._phases = config, groups, phases
        self._admission, self._capacity = admission, admission.capacity
        self._lifecycle = lifecycle
        #: Since when a rank waits for the next step.
        self.hungry_since: float | None = None
        #: Units that were ready at the last trial that missed its target.
        self.tried: int | None = None
        #: When to decide next, though nothing else happens.
        self.wake_at: float | None = None

    def configure(self, config: TriggerConfig) -> None:
        """From now on decide so; a trial that missed its target may be good enough now."""
        self.config, self.tried = config, None

    def note_hunger(self, now: float, *, hungry: bool) -> None:
        """Whether some rank waits for the next step."""
        if not hungry:
            self.hungry_since = None
        elif self.hungry_since is None:
            self.hungry_since = now

    def planned(self) -> None:
        """The next step was planned: what is known of it is over."""
        self.tried = self.hungry_since = None

    def decide(self, ready: int, now: float) -> Decided:
        """What to do for a step that is wanted, with so many units to choose from."""
        decided = decide(self.config, self._situation(ready, now))
        if isinstance(decided, Wait):
            self.wake_at = None if decided.seconds is None else now + decided.seconds
        return decided

    def _situation(self, ready: int, now: float) -> Situation:
        capacity, hungry, helped = self._capacity, self.hungry_since, self._capacity.helped_since
        full = capacity.pressed is not None
        return Situation(
            ready=ready,
            full=full,
            growing=self._groups.samples > 0,
            flush=self._phases.flushing or self._lifecycle.flushes(ready),
            hungry_for=None if hungry is None else now - hungry,
            tried=self.tried,
            stuck=full and self._admission.is_stuck(now) and (ready > 0 or not capacity.is_helped),
            quiet_for=now - capacity.last_moved,
            helped_for=math.inf if helped is None else now - helped,
        )
