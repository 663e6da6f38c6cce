"""Counters of a whole run: they only grow, and go on where they were after a restart."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_dispatcher.core.facts import DropReason
from rollout_dispatcher.core.planning.lengths import LengthCounts
from rollout_dispatcher.core.planning.trigger import Trigger
from rollout_dispatcher.payload import Payload, Taken, count_references
from rollout_dispatcher.sample import Outcome

#: Counters that are one number.
_PLAIN = (
    "received_bytes", "samples_referenced", "referenced_bytes", "small_steps", "steps_committed",
    "samples_committed", "steps_rewound", "samples_rewound", "steps_not_rewound",
    "steps_evicted", "objects_freed", "releases_failed",
)  # fmt: skip


@dataclass(slots=True)
class Totals:
    """Counts of samples or steps.

    received: pushed samples by outcome; refused: by reason. received_bytes: payloads that came with
    those that were accepted. samples_referenced, referenced_bytes: of these, that lie in payload
    stores.
    arrived, dispatched, dropped_lengths: lengths of accepted, planned and dropped samples, in
    tokens; the last are not saved, they are what is left.
    small_steps: steps of fewer samples than a dispatch batch. *_rewound: of what was committed,
    that was taken back. steps_not_rewound: that should have been and could not.
    steps_evicted: retained steps that had to go before a checkpoint covered them. objects_freed: of
    payload stores. releases_failed: answers of workers that could not free some.
    """

    received: Counter[Outcome] = field(default_factory=lambda: Counter(dict.fromkeys(Outcome, 0)))
    refused: Counter[str] = field(default_factory=Counter)
    received_bytes: int = 0
    samples_referenced: int = 0
    referenced_bytes: int = 0
    arrived: LengthCounts = field(default_factory=LengthCounts)
    dispatched: LengthCounts = field(default_factory=LengthCounts)
    dropped_lengths: LengthCounts = field(default_factory=LengthCounts)
    planned: Counter[Trigger] = field(default_factory=lambda: Counter(dict.fromkeys(Trigger, 0)))
    dropped: Counter[DropReason] = field(
        default_factory=lambda: Counter(dict.fromkeys(DropReason, 0))
    )
    small_steps: int = 0
    steps_committed: int = 0
    samples_committed: int = 0
    steps_rewound: int = 0
    samples_rewound: int = 0
    steps_not_rewound: int = 0
    steps_evicted: int = 0
    objects_freed: int = 0
    releases_failed: int = 0

    def accepted(self, tokens: Sequence[int], payloads: Sequence[Payload], taken: Taken) -> None:
        """Count samples that were accepted; taken: by the payloads of all of them."""
        self.received[Outcome.ACCEPTED] += len(tokens)
        self.arrived.add(tokens)
        self.received_bytes += taken.memory
        if taken.referenced:
            self.samples_referenced += count_references(payloads)
            self.referenced_bytes += taken.referenced

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            "received": dict(self.received),
            "refused": dict(self.refused),
            "arrived": [self.arrived.counts.tolist(), self.arrived.tokens],
            "dispatched": [self.dispatched.counts.tolist(), self.dispatched.tokens],
            "planned": dict(self.planned),
            "dropped": dict(self.dropped),
        } | {name: getattr(self, name) for name in _PLAIN}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Start from what `as_json` gave; nothing was saved yet in a new journal."""
        if not saved:
            return
        self.received.update({Outcome(key): count for key, count in saved["received"].items()})
        self.refused.update(saved["refused"])
        self.planned.update({Trigger(key): count for key, count in saved["planned"].items()})
        self.dropped.update({DropReason(key): count for key, count in saved["dropped"].items()})
        self.arrived.restore(*saved["arrived"])
        self.dispatched.restore(*saved["dispatched"])
        for name in _PLAIN:
            setattr(self, name, saved.get(name, 0))
