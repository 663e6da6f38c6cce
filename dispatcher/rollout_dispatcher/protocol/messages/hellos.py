"""Hello and welcome: who connects, what each side speaks, and where both stand.

A hello is read before anything is agreed, so it alone may have keys that this side does not know:
a newer client's are ignored.
"""

from typing import Annotated, Self

from pydantic import Field as Declared
from pydantic import model_validator

from rollout_dispatcher.protocol.messages.base import (
    Count,
    Extent,
    Message,
    Name,
    Part,
    Total,
    Version,
    Watermark,
)
from rollout_dispatcher.protocol.messages.samples import Key, SchemaKnown, StoreAddress
from rollout_dispatcher.protocol.versions import OURS, Offer, Terms

#: Steps that a DP rank can hold uncommitted; far above what memory allows.
MAX_OPEN_STEPS = 1024

#: What a DP rank says of how it trains: main and further losses, in words.
MAX_TRAINING_NAMES, MAX_TRAINING_VALUE = 128, 256

Capabilities = Annotated[list[Name], Declared(max_length=64)]


class Offering(Message, extra="ignore"):
    """What the hellos of all versions of the protocol have in common.

    versions: the first and the last version of the protocol that the client speaks.
    capabilities: what it can do beyond that version; words that are not known are ignored.
    """

    # Strict, a tuple would refuse JSON's list where a validator has made Python of it.
    versions: Annotated[tuple[Extent, Extent], Declared(strict=False)] = OURS.versions
    capabilities: Capabilities = Declared(default_factory=list)

    @model_validator(mode="after")
    def _first_before_last(self) -> Self:
        first, last = self.versions
        if first > last:
            raise ValueError(f"there are no versions from {first} to {last}")
        return self

    @property
    def offer(self) -> Offer:
        """What this client speaks."""
        return Offer(self.versions, frozenset(self.capabilities))


class Hello(Offering):
    """What both roles say.

    client_id: its name, the same on all its connections.
    token: the secret of the dispatcher's `--token-file`.
    """

    client_id: Name
    token: Annotated[str | None, Declared(max_length=1024, repr=False)] = None


class HelloProducer(Hello):
    """A producer introduces itself.

    key: a secret of this client's own, the same on all its connections and told to nobody else.
        Once one was shown with a `client_id`, nobody may use that name without it, whatever token
        they have; null leaves the name to everybody.
    incarnation: what the keys of all objects that it puts into payload stores begin with, followed
        by a slash: its `client_id`, a dot, and a word that no other process has used, without dots
        and slashes. What is there of it and was never pushed is freed when it has left, or another
        one has followed.
    accepted: largest sequence number of a sample that it was told is accepted, -1 for none.
    """

    type_code = 1
    incarnation: Key | None = None
    key: Annotated[str | None, Declared(min_length=16, max_length=128, repr=False)] = None
    accepted: Watermark = -1

    @model_validator(mode="after")
    def _incarnation_is_its_own(self) -> Self:
        """What is swept by the name of an incarnation would be another producer's."""
        name, dot, word = (self.incarnation or "").rpartition(".")
        is_own = dot and word and name == self.client_id and "/" not in word
        if self.incarnation is not None and not is_own:
            raise ValueError(
                f"incarnation {self.incarnation!r:.200} is not the client_id, a dot, and a word "
                "without dots and slashes"
            )
        return self


class CheckpointPosition(Part, extra="ignore"):
    """Where a checkpoint was taken.

    run_id: of the run that it belongs to.
    step: the last step that is in it, -1 for none.
    allow_lost_steps: whether to go on though steps that were trained after it cannot be given
        again; without, that is refused.
    """

    run_id: Name
    step: Watermark
    allow_lost_steps: bool = False


class HelloRank(Hello):
    """A DP rank introduces itself, or says after a reconnect where it stands.

    Said again on the same connection when it has loaded a checkpoint: it has let go of what it was
    sent, and forgets what comes before the welcome.

    dp_rank: its place, from 0.
    dp_size: how many there are.
    generation: the process group that it belongs to; null asks for a new one, which only DP rank 0
        may do.
    run_id: of the run that it was last welcomed to; null if it never was.
    prefetch_steps: steps that it holds ahead of those that its training loop has begun.
    taken: last step that its training loop has begun, -1 for none.
    committed: last step that it has committed in this generation, -1 for none.
    hungry: whether its training loop waits for a step.
    received: open steps that it is prepared for, as pairs of step and number of micro-batches
        received.
    attempts: at those, as pairs of step and attempt, where it is not 0.
    released: last step that it was allowed to train, -1 for none; a dispatcher that was started
        since plans none of these again.
    policy_version, policy_step: what it has reported last, as in `PolicyVersion`.
    resume: the checkpoint that it has loaded in this generation.
    saved: last step of a checkpoint that it has reported saved, -1 for none.
    packed_length: tokens that it pads every micro-batch to; null if it does not.
    training: what shapes its gradients, such as how the loss is averaged, as text by name: the same
        on all DP ranks of a generation, or none of them trains.
    finished, discard: as in `Finish`, if it has said so; null otherwise.
    """

    type_code = 2
    dp_rank: Count
    dp_size: Extent
    generation: Extent | None = None
    run_id: Name | None = None
    prefetch_steps: Count = 1
    taken: Watermark = -1
    committed: Watermark = -1
    hungry: bool = False
    received: list[Annotated[tuple[Count, Count], Declared(strict=False)]] = Declared(
        default_factory=list, max_length=MAX_OPEN_STEPS
    )
    attempts: list[Annotated[tuple[Count, Count], Declared(strict=False)]] = Declared(
        default_factory=list, max_length=MAX_OPEN_STEPS
    )
    released: Watermark = -1
    policy_version: Version | None = None
    policy_step: Count | None = None
    resume: CheckpointPosition | None = None
    saved: Watermark = -1
    packed_length: Extent | None = None
    training: Annotated[
        dict[Name, Annotated[str, Declared(max_length=MAX_TRAINING_VALUE)]],
        Declared(max_length=MAX_TRAINING_NAMES),
    ] = Declared(default_factory=dict)
    finished: Watermark | None = None
    discard: bool = False


class Welcome(Message):
    """What both roles hear.

    version: of the protocol, that both sides speak from now on.
    capabilities: those that both have.
    heartbeat_interval_s: how often the client is to send a Ping, in seconds.
    payload_stores: addresses of the payload stores that references may be into, with the capability
        `references`: a client opens no others. Left out without any.
    """

    optional = ("payload_stores",)
    version: Extent = OURS.versions[1]
    capabilities: Capabilities = Declared(default_factory=list)
    heartbeat_interval_s: float
    payload_stores: Annotated[list[StoreAddress], Declared(max_length=16)] = Declared(
        default_factory=list
    )

    @property
    def terms(self) -> Terms:
        """What was agreed."""
        return Terms(self.version, frozenset(self.capabilities))


class WelcomeProducer(Welcome):
    """The dispatcher takes what this producer pushes.

    run_id: of this run. Where a producer was welcomed to another one before, what that had accepted
        and not trained is lost.
    credits: pushes that it holds for this producer while the buffer is full.
    max_payload_bytes: the largest payload of a push.
    schema_known: the fields that samples have, with the capability `schema`; null while that is not
        decided.
    max_staleness: policy versions that a sample may be older than those that train on it, with the
        capability `feedback`; null without a limit.
    inline_limit: bytes of a span from which on a producer is to put it into the first of
        `payload_stores`, with the capability `references`; null: it sends all of them.
    """

    type_code = 3
    run_id: Name
    credits: Extent
    max_payload_bytes: Total
    schema_known: SchemaKnown | None = None
    max_staleness: Count | None = None
    inline_limit: Count | None = None


class WelcomeRank(Welcome):
    """The DP rank has its place.

    run_id: of this run.
    generation: the process group that the rank belongs to.
    committed: last step that is committed as far as this rank is concerned, -1 for none.
    max_open_steps: uncommitted steps that it may hold before it must commit.
    layout: of micro-batches, packed or padded.
    sample_length_multiple: of what the rank pads each sample's tokens to a multiple, with the
        capability `padding`; null for none.
    prefetch_bytes: of what it fetches from payload stores for steps that its training loop has not
        begun, with the capability `references`: it fetches ahead as far as they fit; null: any.
    max_staleness: policy versions that a sample may be older than those that train on it, which DP
        rank 0 reports; null without a limit.
    """

    type_code = 4
    run_id: Name
    generation: Extent
    committed: Watermark
    max_open_steps: Extent
    layout: str
    sample_length_multiple: Extent | None = None
    prefetch_bytes: Total | None = None
    max_staleness: Count | None = None
