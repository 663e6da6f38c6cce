"""A frozen snapshot of the core, for metrics and /statusz: the only way they look inside."""

from dataclasses import dataclass
from typing import Self

from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.effects import DropReason, Trigger
from rollout_dispatcher.core.steps.ledger import StepLedger
from rollout_dispatcher.core.steps.retained import RetainedSteps
from rollout_dispatcher.core.totals import Totals
from rollout_dispatcher.sample import Outcome


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
    open_group_samples: int
    oldest_arrival: float | None
    pushes_held: int
    pushes_held_bytes: int
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
    run_state: str
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

    @classmethod
    def of(
        cls,
        buffer: SampleBuffer,
        totals: Totals,
        ledger: StepLedger,
        *,
        retained: RetainedSteps,
        pushes_held: int,
        pushes_held_bytes: int,
        backpressure: bool,
        policy_version: int | None,
        run_id: str,
        run_state: str,
    ) -> Self:
        """What the parts of a run show at this moment."""
        ranks, generation = ledger.ranks, ledger.generation
        return cls(
            received=dict(totals.received),
            received_tokens=totals.arrived.tokens,
            received_bytes=totals.received_bytes,
            buffered=len(buffer),
            buffered_tokens=buffer.held_tokens,
            buffered_bytes=buffer.held_bytes,
            ready=buffer.num_ready,
            open_groups=len(buffer.groups),
            open_group_samples=buffer.groups.samples,
            oldest_arrival=buffer.oldest_arrival(),
            pushes_held=pushes_held,
            pushes_held_bytes=pushes_held_bytes,
            backpressure=backpressure,
            in_flight=ledger.steps.in_flight,
            open_steps=ledger.steps.num_uncommitted,
            steps_planned=dict(totals.planned),
            small_steps=totals.small_steps,
            steps_committed=totals.steps_committed,
            samples_committed=totals.samples_committed,
            steps_rewound=totals.steps_rewound,
            samples_rewound=totals.samples_rewound,
            steps_not_rewound=totals.steps_not_rewound,
            steps_retained=len(retained),
            samples_retained=retained.samples,
            retained_bytes=retained.nbytes,
            dropped=dict(totals.dropped),
            run_id=run_id,
            generation=generation.number,
            dp_size=generation.dp_size,
            policy_version=policy_version,
            ranks_connected=sum(rank.connected for rank in ranks.values()),
            last_seen={dp_rank: rank.last_seen for dp_rank, rank in sorted(ranks.items())},
            wanted=ledger.wanted,
            hungry=ledger.hungry,
            run_state=run_state,
            selection_bias=totals.arrived.distance(totals.dispatched),
        )
