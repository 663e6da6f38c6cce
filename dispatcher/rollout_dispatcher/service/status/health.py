"""Whether samples are accepted, and why no step is planned, each reason with how long it is so.

The core knows what is so at a moment. How long it has been so is seen by looking often: a reason
begins when it is first seen, and anew once a step was planned meanwhile. Invariant: `ready` is one
answer, which `/readyz`, the metrics and the log give alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rollout_dispatcher.core.dispatch import Dispatch
from rollout_dispatcher.core.parts import Statistics
from rollout_dispatcher.core.waiting import Cause
from rollout_dispatcher.errors import DispatcherError

#: Often enough to tell seconds; what there are hundreds of ranks or producers of takes a while.
LOOK_EVERY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Delay:
    """What the next step waits for, and for how many seconds already."""

    cause: Cause
    text: str
    seconds: float

    def __str__(self) -> str:
        return self.text + (f" ({_spoken(self.seconds)})" if self.seconds >= 1 else "")


class Health:
    """Looks at one core. failure: why nothing becomes durable at present, if so."""

    def __init__(
        self,
        core: Dispatch,
        failure: Callable[[], DispatcherError | None],
        clock: Callable[[], float],
    ) -> None:
        self._core, self._failure, self._clock = core, failure, clock
        self._since: dict[Cause, float] = {}
        self._next_step = core.next_step
        self._look_at = clock()

    @property
    def failure(self) -> DispatcherError | None:
        """Why nothing becomes durable at present, if so."""
        return self._failure()

    def is_ready(self, at: Statistics) -> bool:
        """Whether samples are accepted."""
        return at.run_state == "running" and self.failure is None

    def look(self, now: float) -> None:
        """See what has begun and what is over, if it is time again."""
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_SECONDS
            self.delays()

    def delays(self, *, anonymous: bool = False) -> list[Delay]:
        """Everything that the next step waits for; nothing if it is on its way.

        anonymous: without the names of clients, groups and files.
        """
        now = self._clock()
        found = [
            (reason.cause, (anonymous and reason.anonymous) or reason.text)
            for reason in self._core.reasons(now)
        ]
        if (failure := self.failure) is not None:
            why = "" if anonymous else f": {failure}"
            found.insert(0, (Cause.JOURNAL, f"the journal cannot be written{why}"))
        before = self._since
        if self._next_step != self._core.next_step:
            self._next_step = self._core.next_step
            before = {}
        self._since = {cause: before.get(cause, now) for cause, _ in found}
        return [Delay(cause, text, now - self._since[cause]) for cause, text in found]

    def warnings(self, at: Statistics) -> list[str]:
        """What is not as the settings ask for, though steps go on."""
        cost = self._core.measured.cost.warning
        found = [cost] if cost else []
        if not at.steps_unjudged:
            return found
        steps = "1 step" if at.steps_unjudged == 1 else f"{at.steps_unjudged} steps"
        unenforced = (
            f"--max-staleness is not enforced: the trainer has committed {steps} and reported no "
            "policy version; call stream.set_policy_version(version) on DP rank 0"
        )
        return [*found, unenforced]

    def explain(self, *, anonymous: bool = False) -> str:
        """All of it in one line, as `delays`; `nobody` if there is nothing."""
        return "; ".join(map(str, self.delays(anonymous=anonymous))) or "nobody"


def _spoken(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
