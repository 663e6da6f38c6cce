"""The chronicle: is told what becomes of steps, remembers the last ones, and has all recorded.

The shell tells it beside what it does; nothing that happens depends on it. Without `--record` it
costs what a step costs, and nothing a sample.
"""

from collections.abc import Callable, Mapping, Sequence

from rollout_dispatcher.core import effects as e
from rollout_dispatcher.core.measuring.times import RankTimes
from rollout_dispatcher.core.parts import Statistics
from rollout_dispatcher.core.steps.step import OpenStep
from rollout_dispatcher.service.chronicle.recent import RecentSteps, SeenStep
from rollout_dispatcher.service.chronicle.recorder import Recorder
from rollout_planner.types import Plan


class Chronicle:
    """recorder: None where nothing is recorded."""

    def __init__(self, clock: Callable[[], float], recorder: Recorder | None = None) -> None:
        self.recent = RecentSteps()
        self._clock, self._recorder = clock, recorder

    # -- samples ----------------------------------------------------------------------------

    def accepted(self, effect: e.SamplesAccepted) -> None:
        """Samples came in."""
        if self._recorder is not None:
            self._recorder.accepted(effect.entries, effect.plain)

    def dropped(self, effect: e.SamplesDropped) -> None:
        """Accepted samples were given up."""
        if self._recorder is not None:
            self._recorder.dropped(effect, self._clock())

    def policy_reported(self, effect: e.PolicyReported) -> None:
        """The trainer has other weights."""
        if self._recorder is not None:
            self._recorder.version(effect.policy_version, self._clock())

    def configured(self, settings: Mapping[str, object]) -> None:
        """Options that changed while it serves, as they are from now on."""
        if self._recorder is not None:
            self._recorder.configured(settings, self._clock())

    # -- plans ------------------------------------------------------------------------------

    def planned(
        self, wanted: e.PlanWanted, effects: Sequence[e.Effect], now: float, generation: int
    ) -> None:
        """What the core made of a plan: a step, unless it was not used."""
        for effect in effects:
            if isinstance(effect, e.StepPlanned):
                eligible = len(wanted.entries)
                gone = self.recent.planned(effect, now, generation=generation, eligible=eligible)
                self._give_up_measuring(gone, now)
                if self._recorder is not None:
                    self._recorder.planned(effect, wanted, now, generation=generation)

    def replanned(self, step: OpenStep, plan: Plan, now: float, generation: int) -> None:
        """An open step has another plan."""
        seen = self.recent.replanned(step, plan, generation=generation)
        if self._recorder is not None:
            attempt = 2 if seen is None else seen.attempt
            self._recorder.replanned(step, attempt, plan, now, generation=generation)

    def withdrawn(self, step: int) -> None:
        """Nothing is left of a step, maybe told once more to a rank that came back."""
        if self.recent.withdrawn(step) and self._recorder is not None:
            self._recorder.withdrawn(step, self._clock())

    # -- steps on their way -----------------------------------------------------------------

    def delivered(self, step: int, dp_rank: int, now: float) -> None:
        """A rank was handed its last micro-batch."""
        if (seen := self.recent.get(step)) is not None:
            seen.delivered[dp_rank] = now

    def released(self, step: int) -> None:
        """Every rank may train it; told once a rank that came back too."""
        seen = self.recent.get(step)
        if seen is not None and seen.released is not None:
            return
        now = self._clock()
        if seen is not None:
            seen.released = now
        if self._recorder is not None:
            self._recorder.released(step, now)

    def taken(self, dp_rank: int, step: int, now: float) -> None:
        """A rank's training loop has begun this step, if it has begun any."""
        if (seen := self.recent.get(step)) is not None:
            seen.taken.setdefault(dp_rank, now)

    def rank_commits(self, dp_rank: int, through: int, now: float) -> None:
        """A rank has applied every step up to that one."""
        for seen in self.recent.open_ones(through):
            if dp_rank in seen.done:
                return  # and what comes before it
            seen.done[dp_rank] = now

    def committed(self, step: int) -> None:
        """Every rank has applied it."""
        seen, now = self.recent.get(step), self._clock()
        if seen is not None:
            seen.committed = now
        if self._recorder is not None:
            self._recorder.committed(step, seen, now)

    def redelivered(self, effect: e.Redelivered) -> None:
        """It goes out again: to a rank that came back, or to all."""
        seen = self.recent.get(effect.step)
        if seen is not None and effect.reason != "reconnect":
            seen.began_again()
        if self._recorder is not None:
            self._recorder.redelivered(effect.step, effect.reason, self._clock())

    def waited(self, dp_rank: int, since: float, seconds: float) -> None:
        """A rank's training loop waited for a step."""
        if self._recorder is not None:
            self._recorder.waited(dp_rank, since, seconds)

    # -- measured times ---------------------------------------------------------------------

    def measured(self, dp_rank: int, told: RankTimes) -> None:
        """A rank says how long each micro-batch took, of a step that is remembered."""
        seen = self.recent.get(told.step)
        times = None if seen is None else seen.times_of(told.cost_key, dp_rank, len(told.busy))
        if seen is None or times is None:
            return
        times.report(dp_rank, told.busy, told.collective, told.why)
        if self._recorder is not None and len(times.busy) == seen.dp_size:
            self._recorder.measured(told.step, told.cost_key, times, self._clock())

    def _give_up_measuring(self, seen: SeenStep | None, now: float) -> None:
        """Record what some ranks have reported of a step whose others never will."""
        if seen is None or self._recorder is None:
            return
        for cost_key, times in seen.measured.items():
            if len(times.busy) < seen.dp_size:
                self._recorder.measured(seen.number, cost_key, times, now)

    # -- once a second ----------------------------------------------------------------------

    def look(self, statistics: Callable[[], Statistics]) -> None:
        """Record what is held now."""
        if self._recorder is not None:
            self._recorder.state(statistics(), self._clock())
