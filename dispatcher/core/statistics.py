"""A frozen snapshot of the core, for metrics and /statusz: the only way they look inside."""

from dataclasses import dataclass

from dispatcher.core.events import DropReason, Outcome, Trigger


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of samples unless the name says otherwise; times are the core's clock, in seconds."""

    received: dict[Outcome, int]
    received_tokens: int
    received_bytes: int
    buffered: int
    buffered_tokens: int
    buffered_bytes: int
    ready: int
    open_groups: int
    oldest_arrival: float | None
    pushes_held: int
    backpressure: bool
    in_flight: int
    open_steps: int
    steps_planned: dict[Trigger, int]
    small_steps: int
    steps_committed: int
    samples_committed: int
    steps_rewound: int
    samples_rewound: int
    steps_not_rewound: int
    steps_retained: int
    samples_retained: int
    retained_bytes: int
    dropped: dict[DropReason, int]
    run_id: str
    generation: int
    dp_size: int
    policy_version: int | None
    ranks_connected: int
    last_seen: dict[int, float]
    wanted: bool
    hungry: bool
    phase: str
    selection_bias: float

    @property
    def accepted(self) -> int:
        """Samples acknowledged as accepted; equals all that is held, in flight, done or dropped."""
        return self.received[Outcome.ACCEPTED]

    @property
    def balanced(self) -> bool:
        """Whether the books balance."""
        done = self.samples_committed - self.samples_rewound
        return self.accepted == (self.buffered + self.in_flight + done + sum(self.dropped.values()))
