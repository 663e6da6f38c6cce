"""The messages of the sample plane: one frozen, strictly validated model each.

    producer                dispatcher                DP rank
    HelloProducer  ------>            <------  HelloRank
                   <------  Welcome*  ------>
    Push           ------>
                   <------  Blocked            (a cap holds the push back; nothing is lost)
                   <------  Resend             (it can come in now, and its payload was let go)
                   <------  Pushed             (what became of each sample)
                                      <------  Demand, PolicyVersion
                            Step      ------>
                            MicroBatch ----->  (once per micro-batch, payload attached)
                                      <------  Prepared
                            Release   ------>  (every rank is prepared: training may see it)
                                      <------  Commit, CheckpointSaved
                            End       ------>
    Ping           ------>  Pong / Error       (either role)

A rank that has loaded a checkpoint says hello again on the same connection: it has let go of what
it was sent, and forgets what comes before the welcome.

Headers are JSON of these models (codec.py). A header is checked against itself here (`Push.spans`);
what it means is the core's affair.
"""

from typing import Annotated

from pydantic import Field as Declared
from pydantic import model_validator

from rollout_dispatcher.errors import ProtocolError, VersionMismatch
from rollout_dispatcher.protocol.columns import Count, Extent, HasColumns, HasFields, Name, Version
from rollout_dispatcher.protocol.columns import Message as Message  # noqa: PLC0414  others know it from here

PROTOCOL_VERSION = 1
#: A step's number, -1 for none.
Watermark = Annotated[int, Declared(ge=-1, lt=2**53)]
Total = Annotated[int, Declared(ge=1, lt=2**53)]


class _Hello(Message):
    """Fields and checks that both roles share."""

    version: int = PROTOCOL_VERSION
    client_id: Name
    token: Annotated[str | None, Declared(max_length=1024, repr=False)] = None

    @model_validator(mode="before")
    @classmethod
    def _same_version(cls, data: object) -> object:
        """Version first: a newer peer's other keys must not hide what is really wrong."""
        theirs = data.get("version") if isinstance(data, dict) else None
        if isinstance(theirs, int) and theirs != PROTOCOL_VERSION:
            raise VersionMismatch(theirs, PROTOCOL_VERSION)
        return data


class HelloProducer(_Hello):
    """A producer introduces itself; `client_id` is stable over reconnects."""

    type_code = 1


class CheckpointPosition(Message):
    """Where a checkpoint was taken: after `step` of this run."""

    type_code = 0
    run_id: Name
    step: Watermark


class HelloRank(_Hello):
    """A DP rank introduces itself, or says after a reconnect where it stands.

    generation: None asks for a new one, which only DP rank 0 may do.
    taken: last step that its training loop has begun, -1 for none.
    committed: last step that it has committed in this generation, -1 for none.
    received: open steps that it holds, as (step, micro-batches received).
    policy_version, policy_step: what it has reported last, as in `PolicyVersion`.
    resume: the checkpoint that it has loaded in this generation.
    saved: last step of a checkpoint that it has reported saved, -1 for none.
    """

    type_code = 2
    dp_rank: Count
    dp_size: Extent
    generation: Extent | None = None
    prefetch_steps: Count = 1
    taken: Annotated[int, Declared(ge=-1)] = -1
    committed: Annotated[int, Declared(ge=-1)] = -1
    hungry: bool = False
    # `_same_version` makes pydantic see Python values, where a strict tuple would refuse a list.
    received: list[Annotated[tuple[Count, Count], Declared(strict=False)]] = Declared(
        default_factory=list
    )
    policy_version: Version | None = None
    policy_step: Count | None = None
    resume: CheckpointPosition | None = None
    saved: Watermark = -1


class WelcomeProducer(Message):
    """credits: pushes that the dispatcher holds for this producer while the buffer is full."""

    type_code = 3
    credits: Extent
    max_payload_bytes: Total
    heartbeat_interval_s: float


class WelcomeRank(Message):
    """max_open_steps: uncommitted steps a rank may hold before it must commit.

    committed: the last step that is committed as far as this rank is concerned, -1 for none.
    """

    type_code = 4
    run_id: Name
    generation: Extent
    committed: Watermark
    max_open_steps: Extent
    layout: str
    heartbeat_interval_s: float


class Push(HasColumns, HasFields):
    """Samples number `first_seq`, `first_seq + 1`, ... of this producer; payload: their spans.

    floor: the producer will never again send a sequence number below this one.
    named: the sample ids were given by the user, so repeats across producers are duplicates.
    group_sizes: members of each sample's group, 0 where `CloseGroup` will tell.
    """

    type_code = 5
    columns = (*HasColumns.columns, "group_sizes")
    first_seq: Count
    floor: Count
    named: bool = False
    group_sizes: list[Count] | None = None

    def spans(self, nbytes: int) -> list[int]:
        """How a payload of `nbytes` bytes is cut: the size of each sample's span.

        Raises ProtocolError when the header's sizes and the payload's differ.
        """
        sizes = self.schema_.sizes(self.tokens)
        if sum(sizes) != nbytes:
            raise ProtocolError(
                f"the header describes {sum(sizes)} payload bytes, the frame carries {nbytes}"
            )
        return sizes


class Pushed(Message):
    """What became of the samples of the push that began at `first_seq`.

    outcomes: accepted, duplicate, refused (never send it again) or full (send it again later); one
        a sample, or a single one that is the outcome of each.
    errors: message of each refused sample, by its index as a string.
    """

    type_code = 6
    first_seq: Count
    outcomes: list[str]
    errors: dict[str, str] = Declared(default_factory=dict)

    def of_each(self, size: int) -> list[str]:
        """The outcome of each sample of a push of `size` samples.

        Raises ProtocolError if there are more or fewer.
        """
        found = self.outcomes * size if len(self.outcomes) == 1 else self.outcomes
        if len(found) != size:
            raise ProtocolError(f"{len(found)} outcomes for a push of {size} samples")
        return found


class Blocked(Message):
    """The push is held back by a cap of the buffer.

    first_seq: None while frames of others are being received and what this producer sends, which is
        not read yet, waits for them; said again with every heartbeat.
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

    keep: whether an incomplete group is trained on rather than dropped; None: as configured.
    number: by which a producer knows this, so that it is heard once however often it is said.
    withdrawn: if given, the group is not closed, but lacks these samples of its producer, by their
        sequence numbers; `size` is then what they have said of it, None if that is told at close.
    """

    type_code = 8
    group_id: Name
    size: Extent | None = None
    keep: bool | None = None
    number: Count | None = None
    withdrawn: list[Count] | None = None


class EndPhase(Message):
    """This producer pushes nothing older than `policy_version` any more; with `force` nobody does.

    Once all who contributed have said so, what is older goes before anything newer is planned.
    """

    type_code = 9
    policy_version: Version
    force: bool = False


class EndStream(Message):
    """This producer pushes nothing any more; with `force` nobody does.

    Once all who contributed have said so, what is buffered is flushed and the ranks' streams end.
    """

    type_code = 10
    force: bool = False


class Demand(Message):
    """taken: last step the training loop has begun; hungry: it waits for the next one."""

    type_code = 11
    taken: Annotated[int, Declared(ge=-1)]
    hungry: bool


class PolicyVersion(Message):
    """DP rank 0 has a new version of the weights; `first_step` is the first that trains with it."""

    type_code = 12
    policy_version: Version
    first_step: Count


class Step(HasFields):
    """One step's header; the same on every DP rank.

    fields: of the samples of all its micro-batches.
    loss_tokens, loss_samples: totals over the whole step and all ranks, for normalisation;
        loss_samples counts the samples with at least one loss token.
    """

    type_code = 13
    step: Count
    digest: Name
    num_micro_batches: Extent
    num_samples: Extent
    tokens: Total
    loss_tokens: Count
    loss_samples: Count


class MicroBatch(HasColumns):
    """One micro-batch of one DP rank; payload: per field its values over all samples, aligned.

    A filler carries the first token of some sample of the step, with no loss tokens.
    """

    type_code = 14
    step: Count
    index: Count
    is_filler: bool = False


class Prepared(Message):
    """The rank holds the step's header and can train it."""

    type_code = 15
    step: Count
    digest: Name


class Release(Message):
    """Every DP rank is prepared: the training loop may have this step."""

    type_code = 16
    step: Count


class Commit(Message):
    """The rank has applied every step up to and including `step`."""

    type_code = 17
    step: Count


class End(Message):
    """No step will follow."""

    type_code = 18
    reason: str


class Error(Message):
    """The connection is over; `code` is the stable word for it."""

    type_code = 19
    code: str
    message: str
    retriable: bool = False


class Ping(Message):
    """The peer is alive."""

    type_code = 20


class Pong(Message):
    """So is the dispatcher."""

    type_code = 21


class Bye(Message):
    """A deliberate goodbye, so that a closed connection is not taken for a fault.

    The dispatcher answers with its own once everything that the peer said before is safe.
    """

    type_code = 22


class Resend(Message):
    """A push that is held back can come in now, and its payload was let go: send it again."""

    type_code = 24
    first_seq: Count


class CheckpointSaved(Message):
    """A checkpoint that was taken after `step` is durable; DP rank 0 speaks for all."""

    type_code = 23
    step: Watermark


MESSAGES: dict[int, type[Message]] = {
    kind.type_code: kind
    for kind in (
        HelloProducer, HelloRank, WelcomeProducer, WelcomeRank, Push, Pushed, Blocked, CloseGroup,
        EndPhase, EndStream, Demand, PolicyVersion, Step, MicroBatch, Prepared, Release, Commit,
        End, Error, Ping, Pong, Bye, CheckpointSaved, Resend,
    )
}  # fmt: skip
