"""A push that is not settled: what of it has been said, and what is known of each sample.

And what came in vain of those that are: samples under ids that were accepted before.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from rollout_dispatcher.errors import SampleRefused, ShuttingDown
from rollout_dispatcher.payload import StoredObject
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.sample import Outcome
from rollout_workers.producer.stored.placing import Put

log = logging.getLogger(__name__)

#: So many in a row are told.
MANY = 256
REMEDY = "give each rollout an id of its own, with its epoch or step in it, or no sample_id"
#: None where a sample met `full` and has to be sent again.
Answer = Outcome | SampleRefused | None


@dataclass(slots=True)
class PendingPush:
    """A push that is not settled.

    payload: mostly memory of the caller's, who waits. put: what of it goes into a payload store
    before it is sent, and stored: where that is, once it is. uncertain: it was on its way when a
    connection ended. fulls: how often it met `full` though credits were free. outcomes: of each
    sample; empty before the first answer.
    """

    message: m.Push
    payload: Sequence[Buffer]
    put: Put | None = None
    stored: StoredObject | None = None
    sent: bool = False
    uncertain: bool = False
    fulls: int = 0
    blocked: m.Blocked | None = None
    outcomes: Sequence[Answer] = ()
    #: All that its samples consist of, wherever it is sent or put.
    _contents: Sequence[Buffer] = field(init=False)

    def __post_init__(self) -> None:
        self._contents = self.payload

    @property
    def is_being_put(self) -> bool:
        """Whether it waits for its object to be there."""
        return self.put is not None and self.stored is None

    @property
    def owns_object(self) -> bool:
        """Whether there is an object of which the dispatcher has no sample."""
        known = any(isinstance(outcome, Outcome) for outcome in self.outcomes)
        return self.stored is not None and not known

    def was_put(self, stored: StoredObject) -> None:
        """Its object is there."""
        assert self.put is not None
        self.message = self.message.model_copy(update=self.put.placed(stored))
        self.payload, self.stored = self.put.payload, stored

    def let_go(self) -> None:
        """The caller may change his arrays from now on."""
        self.payload = [b"".join(self.payload)]
        self._contents = ()

    def answered(self, answer: m.Pushed) -> Sequence[Answer]:
        """Take an answer; returns what is known of each sample now."""
        self.outcomes = self._known(answer)
        self.sent = self.uncertain = False
        return self.outcomes

    def identities(self) -> list[str] | list[bytes]:
        """What each sample is known by if it comes again: its id, or what it consists of."""
        if self.message.named:
            return self.message.sample_ids
        if self.put is None and self.message.places is not None:  # all of it lay in stores before
            stored = list(map(repr, self.message.objects or ()))
            return [f"{stored[at[0]]}@{at[1]}" for at in self.message.places if at is not None]
        data, stop = b"".join(self._contents), 0
        found = []
        for size in self.message.sizes():
            start, stop = stop, stop + size
            found.append(blake2b(data[start:stop], digest_size=16).digest())
        return found

    def _known(self, answer: m.Pushed) -> Sequence[Answer]:
        words = answer.of_each(len(self.message.tokens))
        if not self.outcomes and answer.outcomes == [Outcome.ACCEPTED]:
            return [Outcome.ACCEPTED] * len(words)  # as nearly always
        known = self.outcomes or [None] * len(words)
        return [
            self._outcome(word, str(index), answer) if before is None else before
            for index, (word, before) in enumerate(zip(words, known, strict=True))
        ]

    def _outcome(self, said: Outcome, index: str, answer: m.Pushed) -> Answer:
        match said:
            case Outcome.ACCEPTED:
                return Outcome.ACCEPTED
            case Outcome.DUPLICATE | Outcome.CONFLICT:
                # Without names it can only be our own number: it was accepted before.
                return said if self.message.named else Outcome.ACCEPTED
            case Outcome.REFUSED:
                error = answer.errors.get(index, "the dispatcher refused the sample")
                reason = answer.reasons.get(index, SampleRefused.code)
                if reason == ShuttingDown.code:
                    return ShuttingDown(error)
                return SampleRefused(reason, error)
            case Outcome.FULL:
                return None


class Repeats:
    """Counts since the connection began. conflicts: samples with other content, of all time."""

    def __init__(self) -> None:
        self.conflicts = self._in_a_row = 0

    def begin(self) -> None:
        """Connected anew: what was under way comes again, and was perhaps accepted."""
        self._in_a_row = 0

    def answered(self, ids: Sequence[str], outcomes: Sequence[Answer]) -> None:
        """These samples, whose ids the user gave, were not under way before."""
        for sample_id, outcome in zip(ids, outcomes, strict=True):
            if outcome is Outcome.CONFLICT:
                self._conflicts(sample_id)
            if outcome is Outcome.ACCEPTED:
                self._in_a_row = 0
            elif outcome in (Outcome.DUPLICATE, Outcome.CONFLICT):
                self._in_a_row += 1
                if self._in_a_row == MANY:
                    log.warning(
                        "%d samples in a row, up to %s, have ids of samples that were accepted "
                        "before, and are not trained on: right for a replay after a crash; "
                        "otherwise %s", MANY, sample_id, REMEDY,
                    )  # fmt: skip

    def _conflicts(self, sample_id: str) -> None:
        self.conflicts += 1
        if self.conflicts == 1:
            log.warning(
                "%s; this is said once, push() returns Outcome.CONFLICT for each, or raises with "
                "on_conflict='raise'", in_words(sample_id),
            )  # fmt: skip

    def end(self) -> None:
        """The producer is closed."""
        if self.conflicts > 1:
            log.warning("%d samples had ids of accepted ones with other content", self.conflicts)


def in_words(sample_id: str) -> str:
    """What is said of a conflict."""
    return (
        f"sample {sample_id} has other content than the accepted sample of this id, which is kept: "
        f"the new one is not trained on; {REMEDY}"
    )
