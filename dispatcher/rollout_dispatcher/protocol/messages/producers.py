"""What producers and the dispatcher say to each other.

producer                dispatcher
Push           ------>
<------  Blocked     (a cap holds the push back; nothing is lost)
<------  Resend      (it can come in now, and its payload was let go)
<------  Pushed      (what became of each sample)
<------  Feedback    (where the trainer is, when that changes)
<------  Dropped     (samples that were accepted will not be trained on)
<------  Advice      (for people: what is likely a mistake)
CloseGroup, EndPhase, EndStream -->
"""

from typing import Annotated, Self

from pydantic import Field as Declared
from pydantic import model_validator

from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.protocol.messages.base import (
    Checksum,
    Count,
    Extent,
    Message,
    Name,
    Tokens,
    Version,
)
from rollout_dispatcher.protocol.messages.samples import MAX_SAMPLES, HasFields, HasSamples
from rollout_dispatcher.sample import Outcome


class Push(HasSamples, HasFields):
    """Samples, numbered in the order in which a producer makes them; payload: their spans.

    tokens: of each sample; at most 1,024 samples, and a larger batch in several pushes.
    first_seq: number of the first; the others follow.
    floor: the producer will never again send a number below this one.
    named: the sample ids were given by the user, so repeats across producers are duplicates, or
        conflicts.
    checksums: of each sample's content, if they are `named`: any number below 2^32 that is the same
        for the same content. A repeat with another one is a conflict; left out, none ever is.
    group_sizes: members of each sample's group, 0 where `CloseGroup` will tell; left out where
        they are as configured.
    left_out: positions that `loss_mask` marks in these samples and `loss_tokens` leaves out,
        counted in a metric.
    staleness_exempt: which samples may be trained on however old they are, and need no policy
        version where `--max-staleness` is set; left out where none is.
    """

    type_code = 5
    each = (*HasSamples.each, "group_sizes", "staleness_exempt", "checksums")
    tokens: Annotated[list[Tokens], Declared(max_length=MAX_SAMPLES)]
    first_seq: Count
    floor: Count
    named: bool = False
    checksums: list[Checksum] | None = None
    group_sizes: list[Count] | None = None
    left_out: Count = 0
    staleness_exempt: list[bool] | None = None

    def spans(self, nbytes: int) -> list[int]:
        """The size of each sample's span in the payload: 0 for those that lie in an object."""
        sizes = self.sizes()
        if self.places is not None:
            sizes = [0 if at else size for at, size in zip(self.places, sizes, strict=True)]
        if sum(sizes) != nbytes:
            raise ProtocolError(
                f"the header describes {sum(sizes)} payload bytes, the frame carries "
                f"{nbytes}{self.rows_in_words()}"
            )
        return sizes

    def sizes(self) -> list[int]:
        """The size of each sample's span, wherever it is."""
        return self.schema_.sizes(self.tokens, self.rows_of(self.schema_))


class HasFeedback(Message):
    """Where the trainer is, with the capability `feedback`; null: as said last on this connection.

    policy_version: that DP rank 0 has reported last.
    expected_version: that a sample pushed now will be trained with, if samples go in order.
    remaining: samples (groups, where steps are counted in these) that the soft caps still let in.
    """

    policy_version: Version | None = None
    expected_version: Version | None = None
    remaining: Count | None = None


class Pushed(HasFeedback):
    """What became of the samples of a push, and where the trainer is.

    first_seq: of the push.
    outcomes: one a sample, or a single one that is the outcome of each: accepted, duplicate,
        conflict (a duplicate with other content: the first is kept), refused (never send it again)
        or full (send it again later).
    errors: message of each refused sample, by its index as a string.
    reasons: with the capability `reasons`, why in a word, likewise: with `shutting-down` it may be
        pushed once the dispatcher is started again, or elsewhere.
    staleness: of the push's oldest sample by now, in policy versions, with the capability
        `feedback`; null where that is not known.
    """

    type_code = 6
    optional = ("reasons",)
    first_seq: Count
    outcomes: list[Annotated[Outcome, Declared(strict=False)]]
    errors: dict[str, str] = Declared(default_factory=dict)
    reasons: dict[str, str] = Declared(default_factory=dict)
    staleness: Count | None = None

    def of_each(self, size: int) -> list[Outcome]:
        """The outcome of each sample of a push of `size` samples.

        Raises ProtocolError if there are more or fewer.
        """
        found = self.outcomes * size if len(self.outcomes) == 1 else self.outcomes
        if len(found) != size:
            raise ProtocolError(f"{len(found)} outcomes for a push of {size} samples")
        return found


class Feedback(HasFeedback):
    """Where the trainer is has changed while nothing of this producer's was to be answered.

    Said after the welcome too. Changes that follow each other within a tenth of a second are said
    at once.
    """

    type_code = 26


class Dropped(Message):
    """Samples of this producer that were accepted will never be trained on.

    Said with the capability `feedback` to who is connected then, and not again.

    reason: stale, incomplete-group and so on, as the metric of dropped samples has it.
    sample_ids: which, at most 1,024 at a time.
    group_ids: the group of each, null for none; left out where no sample has one.
    """

    type_code = 27
    reason: Name
    sample_ids: Annotated[list[Name], Declared(min_length=1, max_length=MAX_SAMPLES)]
    group_ids: list[Name | None] | None = None

    @model_validator(mode="after")
    def _lists_agree(self) -> Self:
        if self.group_ids is not None and len(self.group_ids) != len(self.sample_ids):
            raise ValueError("group_ids and sample_ids differ in length")
        return self


class Blocked(Message):
    """A push is held back by a cap of the buffer.

    first_seq: of the push; null while frames of others are being received and what this producer
        sends, which is not read yet, waits for them; said again with every heartbeat.
    cap: which.
    held: how much is held, in the cap's unit.
    capacity: how much may be.
    waits_for: in words, whom the next step waits for.
    """

    type_code = 7
    first_seq: Count | None = None
    cap: str
    held: Count
    capacity: Count
    waits_for: str = ""


class CloseGroup(Message):
    """No further member of this group will come, or none beyond `size`.

    group_id: which.
    size: members that it has then; null for those that came.
    keep: whether an incomplete group is trained on rather than dropped; null: as configured.
    number: by which a producer knows this, so that it is heard once however often it is said.
    withdrawn: if given, the group is not closed, but lacks these samples of its producer, by their
        sequence numbers, at most 1,024 at a time; `size` is then what they have said of it, null
        if that is told at close.
    """

    type_code = 8
    group_id: Name
    size: Extent | None = None
    keep: bool | None = None
    number: Count | None = None
    withdrawn: Annotated[list[Count], Declared(max_length=MAX_SAMPLES)] | None = None


class EndPhase(Message):
    """This producer pushes nothing older than a policy version any more.

    Once all who contributed to the run have said so, what is older goes before what is newer.

    policy_version: which.
    force: nobody pushes anything older any more.
    """

    type_code = 9
    policy_version: Version
    force: bool = False


class EndStream(Message):
    """This producer pushes nothing any more.

    Once all who contributed have said so, what is buffered is flushed and the ranks' streams end.

    force: nobody pushes anything any more.
    """

    type_code = 10
    force: bool = False


class Resend(Message):
    """A push that is held back can come in now, and its payload was let go: send it again.

    first_seq: of the push.
    """

    type_code = 24
    first_seq: Count
