"""A push that is not settled: what of it has been said, and what is known of each sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.sample import Outcome

#: None where a sample met `full` and has to be sent again.
Answer = Outcome | SampleRefused | None


@dataclass(slots=True)
class PendingPush:
    """A push that is not settled.

    payload: mostly memory of the caller's, who waits. uncertain: it was on its way when a
    connection ended. fulls: how often it met `full` though credits were free. outcomes: of each
    sample; empty before the first answer.
    """

    message: m.Push
    payload: Sequence[Buffer]
    sent: bool = False
    uncertain: bool = False
    fulls: int = 0
    blocked: m.Blocked | None = None
    outcomes: Sequence[Answer] = ()

    def answered(self, answer: m.Pushed) -> Sequence[Answer]:
        """Take an answer; returns what is known of each sample now."""
        self.outcomes = self._known(answer)
        self.sent = self.uncertain = False
        return self.outcomes

    def identities(self) -> list[str] | list[bytes]:
        """What each sample is known by if it comes again: its id, or what it consists of."""
        if self.message.named:
            return self.message.sample_ids
        data, stop = b"".join(self.payload), 0
        found = []
        for size in self.message.spans(len(data)):
            start, stop = stop, stop + size
            found.append(blake2b(data[start:stop], digest_size=16).digest())
        return found

    def _known(self, answer: m.Pushed) -> Sequence[Answer]:
        words = answer.of_each(len(self.message.tokens))
        if not self.outcomes and answer.outcomes == [Outcome.ACCEPTED]:
            return [Outcome.ACCEPTED] * len(words)  # as nearly always
        known = self.outcomes or [None] * len(words)
        return [
            self._outcome(word, answer.errors.get(str(index))) if before is None else before
            for index, (word, before) in enumerate(zip(words, known, strict=True))
        ]

    def _outcome(self, said: Outcome, error: str | None) -> Answer:
        match said:
            case Outcome.ACCEPTED:
                return Outcome.ACCEPTED
            case Outcome.DUPLICATE:
                # Without names it can only be our own number: it was accepted before.
                return Outcome.DUPLICATE if self.message.named else Outcome.ACCEPTED
            case Outcome.REFUSED:
                return SampleRefused("refused", error or "the dispatcher refused the sample")
            case Outcome.FULL:
                return None
