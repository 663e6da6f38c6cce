"""The messages of the sample plane: `from rollout_dispatcher.protocol import messages as m`.

A message is one frozen, strictly validated model; its header is the model's JSON. docs/protocol.md
is generated from the class docstrings, which define each field. Facts of samples (`tokens`,
`sample_ids`, ...) are lists with one entry per sample.
"""

from collections.abc import Iterable, Sequence, Sized
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic import Field as Declared

from rollout_dispatcher.ends import EndReason
from rollout_dispatcher.errors import ProtocolError
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.protocol.slices import Slicing
from rollout_dispatcher.sample import DType, Field, Outcome, Schema, schema_of
from rollout_dispatcher.spans import RowsByField
from rollout_planner.types import UPDATE

#: Version of the protocol: the set of messages and of their keys.
VERSION = 3

MAX_NAME = 128
Name = Annotated[str, Declared(min_length=1, max_length=MAX_NAME)]
Count = Annotated[int, Declared(ge=0, lt=2**53)]
Tokens = Annotated[int, Declared(ge=0, lt=2**31)]
Rows = Annotated[int, Declared(ge=0, lt=2**31)]
Version = Count
Extent = Annotated[int, Declared(ge=1, lt=2**31)]
Checksum = Annotated[int, Declared(ge=0, lt=2**32)]
Total = Annotated[int, Declared(ge=1, lt=2**53)]
Pair = Annotated[tuple[Count, Count], Declared(strict=False)]
#: A step's number, -1 for none.
Watermark = Annotated[int, Declared(ge=-1, lt=2**53)]
#: Characters of a payload store's error text, for people; the sender cuts it to this length.
MAX_WHY_LETTERS = 400
Why = Annotated[str, Declared(max_length=MAX_WHY_LETTERS)]


class Part(BaseModel):
    """Base of everything in a header: immutable, no unknown keys, no coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Message(Part):
    """Base of all messages; a class with a `code` can be sent.

    optional: keys that are left out at their default.
    """

    type_code: ClassVar[int]
    optional: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(
        cls, *, code: int | None = None, optional: tuple[str, ...] = (), **config: Any
    ) -> None:
        super().__init_subclass__(**config)
        cls.optional += optional
        if code is not None:
            cls.type_code = code
            known = MESSAGES.setdefault(code, cls)
            assert known is cls, f"{cls.__name__} has the code of {known.__name__}"

    def spans(self, nbytes: int) -> Sequence[int]:
        """Sizes of the pieces of a payload of `nbytes` bytes; each piece has its own memory.

        Raises ProtocolError when the header describes more or fewer bytes.
        """
        if nbytes:
            raise ProtocolError(f"{type(self).__name__} does not carry a payload")
        return ()


#: By type code.
MESSAGES: dict[int, type[Message]] = {}


def _check_lengths(lists: Iterable[tuple[str, Sized | None]], size: int, of: str) -> None:
    for name, values in lists:
        if values is not None and len(values) != size:
            raise ValueError(f"{name} has {len(values)} entries for {size} {of}")


# -- samples, which several messages have ----------------------------------------------------------

#: Samples of one push; a larger batch is pushed in parts. The event loop handles no other peer
#: while it reads and decides on one push, which takes some milliseconds at this size.
MAX_SAMPLES = 1024
#: Fields of a sample; far above what any trainer reads.
MAX_FIELDS = 64
#: Dimensions of a field, without that of tokens.
MAX_DIMENSIONS = 8
#: Characters of an object's key.
MAX_KEY_LETTERS = 512
#: Address of a payload store.
StoreAddress = Annotated[str, Declared(min_length=1, max_length=1024)]
#: Of an object in its store.
Key = Annotated[str, Declared(min_length=1, max_length=MAX_KEY_LETTERS)]


class FieldHeader(Part):
    """One tensor of every sample.

    name: of the field.
    dtype: type of its elements, little endian.
    per_token: whether the first dimension is the sample's tokens, followed by `shape`; if not,
        and if it is not ragged, `shape` is all there is.
    shape: its dimensions, without that of tokens or rows.
    ragged: true if the first dimension is a number of rows of each sample's own, followed by
        `shape`; left out otherwise. A field of type str is ragged, and its rows are one text a
        sample, in UTF-8.
    """

    name: Name
    dtype: Annotated[DType, Declared(strict=False)]
    per_token: bool = True
    shape: list[Extent] = Declared(default_factory=list, max_length=MAX_DIMENSIONS)
    ragged: Literal[True] | None = None

    @property
    def field(self) -> Field:
        """As the core has it."""
        return Field(self.name, self.dtype, self.per_token, tuple(self.shape), bool(self.ragged))


class HasFields(Message):
    """The fields that samples share.

    fields: of every sample, in the order in which they lie in its span.
    """

    fields: Annotated[list[FieldHeader], Declared(min_length=1, max_length=MAX_FIELDS)]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if len({field.name for field in self.fields}) != len(self.fields):
            raise ValueError("a field is named twice")
        return self

    @cached_property
    def schema_(self) -> Schema:
        """The schema that all these samples share."""
        return schema_of(tuple([header.field for header in self.fields]))


class SchemaKnown(HasFields, code=25):
    """The fields of samples are decided: samples with others are refused from now on.

    Sent to producers with `feedback`. A client converts values of another type where that keeps
    them as they are; the dispatcher does not read values.

    set_by: in words, what decided them.
    """

    set_by: str


class ObjectHeader(Part):
    """An object of a payload store.

    store: the store's address, one of the welcome's `payload_stores`.
    key: of the object there; it begins with the incarnation of the producer that has put it.
    nbytes: of the whole object.
    """

    store: StoreAddress
    key: Key
    nbytes: Total


class HasSamples(Message):
    """Facts about samples.

    tokens: of each sample.
    loss_tokens: tokens of each that the loss counts; never the first, which nothing predicts.
    sample_ids: the id of each.
    group_ids: the group of each, null for none; left out where no sample has one.
    policy_versions: version of the weights that generated the oldest token of each; left out where
        none is known.
    rows: of each ragged field by its name, those of each sample; left out where no field is ragged.
    objects: of payload stores, that spans of these samples lie in; left out where all samples are
        in the frame's payload.
    places: of each sample the index of its object and the byte there that its span begins at; null
        if it is in the frame's payload, which has these samples alone. Left out with `objects`.
    """

    #: The lists that have one entry a sample, beside `tokens`.
    each: ClassVar[tuple[str, ...]] = (
        "loss_tokens", "sample_ids", "group_ids", "policy_versions", "places",
    )  # fmt: skip
    tokens: list[Tokens]
    loss_tokens: list[Count]
    sample_ids: list[Name]
    group_ids: list[Name | None] | None = None
    policy_versions: list[Version | None] | None = None
    rows: Annotated[dict[Name, list[Rows]], Declared(max_length=MAX_FIELDS)] | None = None
    objects: Annotated[list[ObjectHeader], Declared(min_length=1)] | None = None
    places: list[Pair | None] | None = None

    @model_validator(mode="after")
    def _lists_agree(self) -> Self:
        size = len(self.tokens)
        _check_lengths([(name, getattr(self, name)) for name in self.each], size, "samples")
        for name, rows in (self.rows or {}).items():
            _check_lengths([(f"rows of {name}", rows)], size, "samples")
        if (self.objects is None) != (self.places is None):
            raise ValueError("objects and places come together, or neither")
        if self.places is None:
            return self
        last = max((place[0] for place in self.places if place), default=-1)
        if last >= len(self.objects or ()):
            raise ValueError(f"a place is in none of {len(self.objects or ())} objects")
        return self

    def rows_of(self, schema: Schema) -> RowsByField:
        """Rows of each sample, for each ragged field of the schema.

        Raises ProtocolError where the message has rows of other fields.
        """
        given = self.rows or {}
        if given.keys() != {*schema.ragged}:
            raise ProtocolError(
                f"{type(self).__name__} has rows of {_listed(given)}, the ragged fields are "
                f"{_listed(schema.ragged)}"
            )
        return [given[name] for name in schema.ragged]

    def references(self, schema: Schema) -> list[Reference | None]:
        """Where each sample's span is in a payload store; None for a span in the frame.

        Raises ProtocolError for a span that reaches beyond its object.
        """
        objects = [StoredObject(item.store, item.key, item.nbytes) for item in self.objects or ()]
        sizes, found = schema.sizes(self.tokens, self.rows_of(schema)), list[Reference | None]()
        for index, (place, nbytes) in enumerate(zip(self.places or (), sizes, strict=True)):
            if place is None:
                found.append(None)
                continue
            stored, offset = objects[place[0]], place[1]
            if offset + nbytes > stored.nbytes:
                raise ProtocolError(
                    f"the span of sample {self.sample_ids[index]} has {nbytes} bytes and begins at "
                    f"byte {offset} of the object {stored.key}, which has {stored.nbytes}"
                )
            found.append(Reference(stored, offset, nbytes))
        return found

    def rows_in_words(self) -> str:
        """Number of rows of each ragged field, for an error message."""
        found = ", ".join(f"{name} {sum(rows)}" for name, rows in (self.rows or {}).items())
        return f"; rows: {found}" if found else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


@lru_cache(maxsize=64)
def field_headers(schema: Schema) -> list[FieldHeader]:
    """A schema as it is sent. The list is cached: do not change it."""
    return [
        FieldHeader(
            name=item.name,
            dtype=item.dtype,
            per_token=item.per_token,
            shape=list(item.shape),
            ragged=True if item.ragged else None,
        )
        for item in schema.fields
    ]


# -- hello and welcome -----------------------------------------------------------------------------
#
#   A hello is read before a version is agreed on. It alone may have unknown keys, which are
#   ignored: a newer client may send them.

#: Steps that a DP rank can hold uncommitted; far above what memory allows.
MAX_OPEN_STEPS = 1024

#: Pairs of an open step and a number.
ByStep = Annotated[list[Pair], Declared(max_length=MAX_OPEN_STEPS)]

#: Entries, and characters of a value, of `HelloRank.training`.
MAX_TRAINING_NAMES, MAX_TRAINING_VALUE = 128, 256
Trait = Annotated[str, Declared(max_length=MAX_TRAINING_VALUE)]


class Offering(Message, extra="ignore"):
    """The part of a hello that all versions of the protocol share.

    version: of the protocol that the client speaks; a hello without it, or with any other than the
        dispatcher's, is refused.
    """

    version: Extent


class Hello(Offering):
    """The keys of a hello that both roles send.

    client_id: the client's name, the same on all its connections.
    token: the secret of the dispatcher's `--token-file`.
    opens_stores: whether the client opens payload stores: it may send or receive references to
        samples there, and may be asked to release objects.
    """

    version: Extent = VERSION  # for the sender; the receiver checks it in the `Offering`
    client_id: Name
    token: Annotated[str | None, Declared(max_length=1024, repr=False)] = None
    opens_stores: bool = False


class HelloProducer(Hello, code=1):
    """A producer introduces itself.

    key: a secret of this client, the same on all its connections. Once it was shown with a
        `client_id`, a hello of that name without it is refused, whatever its token; null leaves the
        name open to every client.
    incarnation: the keys of all objects that it puts into payload stores begin with this and a
        slash: its `client_id`, a dot, and a word that no other process has used, without dots and
        slashes. Objects that it put and never pushed are released once it has left, or another
        process has taken its place.
    accepted: largest sequence number that a `Pushed` reported to it as accepted, -1 for none.
    feedback: whether the dispatcher is to send it the trainer's progress, dropped samples, the
        fields of samples, and hints.
    """

    incarnation: Key | None = None
    key: Annotated[str | None, Declared(min_length=16, max_length=128, repr=False)] = None
    accepted: Watermark = -1
    feedback: bool = False

    @model_validator(mode="after")
    def _incarnation_is_its_own(self) -> Self:
        """Else a sweep of the incarnation could release another producer's objects."""
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
    allow_lost_steps: whether to go on although steps trained after it cannot be delivered again;
        if false, the dispatcher refuses.
    """

    run_id: Name
    step: Watermark
    allow_lost_steps: bool = False


class HelloRank(Hello, code=2):
    """A DP rank introduces itself, or reports its position after a reconnect.

    Sent again on the same connection after it has loaded a checkpoint: the rank has discarded the
    messages before, and ignores further ones until the welcome.

    dp_rank: its index, from 0.
    dp_size: number of DP ranks.
    generation: the process group that it belongs to; null asks for a new one, which only DP rank 0
        may do.
    run_id: of the run that it was last welcomed to; null if it never was.
    prefetch_steps: steps that it holds ahead of those that its training loop has begun.
    taken: last step that its training loop has begun, -1 for none.
    committed: last step that it has committed in this generation, -1 for none.
    hungry: whether its training loop waits for a step.
    received: open steps that it is prepared for, as pairs of step and number of micro-batches
        received.
    attempts: of these steps, pairs of step and attempt, where the attempt is not 0.
    released: last step that it was allowed to train, -1 for none; a dispatcher that has restarted
        since plans none of these steps again.
    policy_version, policy_step: the version and first step that it has reported last, as in
        `PolicyVersion`.
    resume: the checkpoint that it has loaded in this generation.
    saved: last step of a checkpoint that it has reported saved, -1 for none.
    packed_length: tokens that it pads every micro-batch to; null if it does not.
    max_split: DP ranks that it can train a micro-batch together with, itself counted; null: 1.
    slicing: which slice of a shared sample the dispatcher sends to it: `zigzag` or `contiguous`;
        null: whole samples.
    training: what shapes its gradients, such as how the loss is averaged, as text by name: the same
        on all DP ranks of a generation, or none of them trains.
    finished, discard: as in `Finish`, if it has sent that; else null and false.
    """

    dp_rank: Count
    dp_size: Extent
    generation: Extent | None = None
    run_id: Name | None = None
    prefetch_steps: Count = 1
    taken: Watermark = -1
    committed: Watermark = -1
    hungry: bool = False
    received: ByStep = Declared(default_factory=list)
    attempts: ByStep = Declared(default_factory=list)
    released: Watermark = -1
    policy_version: Version | None = None
    policy_step: Count | None = None
    resume: CheckpointPosition | None = None
    saved: Watermark = -1
    packed_length: Extent | None = None
    max_split: Extent | None = None
    slicing: Slicing | None = None
    training: dict[Name, Trait] = Declared(default_factory=dict, max_length=MAX_TRAINING_NAMES)
    finished: Watermark | None = None
    discard: bool = False


class Welcome(Message, optional=("payload_stores",)):
    """The keys of a welcome that both roles receive.

    heartbeat_interval_s: how often the client is to send a Ping, in seconds.
    payload_stores: addresses of the payload stores that references may be into: a client opens no
        others. Left out if there are none, or the client opens none.
    """

    heartbeat_interval_s: float
    payload_stores: list[StoreAddress] = Declared(default_factory=list, max_length=16)


class WelcomeProducer(Welcome, code=3):
    """The dispatcher takes pushes of this producer.

    run_id: of this run. If an earlier welcome had another, samples that the earlier run accepted
        and did not train are lost.
    credits: pushes that the dispatcher holds for this producer while the buffer is full.
    max_payload_bytes: the largest payload of a push.
    schema_known: the fields that samples have; null while that is not decided.
    max_staleness: policy versions that a sample may be older than those that train on it; null
        without a limit.
    inline_limit: a producer puts spans of this many bytes or more into the first of
        `payload_stores`; null: it sends all spans.
    """

    run_id: Name
    credits: Extent
    max_payload_bytes: Total
    schema_known: SchemaKnown | None = None
    max_staleness: Count | None = None
    inline_limit: Count | None = None


class WelcomeRank(Welcome, code=4):
    """The DP rank has joined.

    run_id: of this run.
    generation: the process group that the rank belongs to.
    committed: last step that is committed as far as this rank is concerned, -1 for none.
    max_open_steps: uncommitted steps that it may hold before it must commit.
    layout: of micro-batches, packed or padded.
    sample_length_multiple: the rank pads each sample to a multiple of so many tokens; null for no
        padding.
    prefetch_bytes: bytes that it may fetch from payload stores for steps that its training loop has
        not begun; null for no limit.
    max_staleness: policy versions that a sample may be older than those that train on it, which DP
        rank 0 reports; null without a limit.
    """

    run_id: Name
    generation: Extent
    committed: Watermark
    max_open_steps: Extent
    layout: str
    sample_length_multiple: Extent | None = None
    prefetch_bytes: Total | None = None
    max_staleness: Count | None = None


# -- of both roles ---------------------------------------------------------------------------------


class Error(Message, code=19):
    """The connection is over.

    code: stable code of the error.
    message: the cause, its meaning and the remedy.
    retriable: whether the same request can succeed later, on another connection.
    """

    code: str
    message: str
    retriable: bool = False


class Ping(Message, code=20, optional=("handed_out", "collectives")):
    """The client is alive. A DP rank also reports the progress of its training loop.

    handed_out: micro-batches of open steps handed to the training loop so far, in all passes; left
        out if 0.
    collectives: collectives begun in process groups of all DP ranks, as far as they are counted;
        left out if 0.
    """

    handed_out: Count = 0
    collectives: Count = 0


class Pong(Message, code=21, optional=("waits_for",)):
    """The dispatcher is alive, and has handled all messages before the Ping.

    waits_for: what the next step waits for, in words, for a DP rank whose training loop waits for
        that step; left out otherwise.
    """

    waits_for: str = ""


class Bye(Message, code=22):
    """A deliberate goodbye: the closed connection is no fault.

    The client sends nothing after it but `Freed` and `Swept`, if asked. The dispatcher answers with
    a Bye once everything that the client has sent is durable.
    """


class Advice(Message, code=37):
    """A hint for the client's log; it changes nothing else.

    Sent to DP rank 0 of the trainer, and to producers with `feedback`.

    text: the finding and its remedy.
    """

    text: str


# -- stores: requests to any client that opens payload stores, as the dispatcher opens none --------
#
#   dispatcher               producer or DP rank
#   Free           ------>   (nobody needs these objects any more)
#   <------   Freed
#   Sweep          ------>   (what is there of an incarnation that has ended?)
#   <------   Swept

#: Keys in one message.
MAX_KEYS = 1024
Keys = Annotated[list[Key], Declared(max_length=MAX_KEYS)]


class StoreRequest(Message):
    """number: of the request; the answer has it too.
    store: the store's address.
    """

    number: Count
    store: StoreAddress


class Free(StoreRequest, code=30):
    """No sample needs these objects any more: release them. A missing object counts as released.

    keys: of the objects, at most 1,024 in one message.
    """

    keys: Keys


class Freed(Message, code=31):
    """The result of a Free.

    number: of the Free.
    left: keys of objects that their store could not release.
    why: error of the store, for people.
    """

    number: Count
    left: Keys = Declared(default_factory=list)
    why: Why = ""


class Sweep(StoreRequest, code=32):
    """A process of a producer has ended: list the objects of it that are in the store.

    prefix: common prefix of their keys.
    """

    prefix: Key


class Swept(Message, code=33):
    """The result of a Sweep. The dispatcher sends Free for the objects that it does not know.

    number: of the Sweep.
    keys: of the objects, at most 1,024 in one message.
    more: whether there are others; the dispatcher sweeps again once these are freed.
    why: error of the store, if it failed, for people.
    """

    number: Count
    keys: Keys = Declared(default_factory=list)
    more: bool = False
    why: Why = ""


# -- producers -------------------------------------------------------------------------------------
#
#   producer                dispatcher
#   Push           ------>
#   <------  Blocked     (a cap holds the push back; nothing is lost)
#   <------  Resend      (it fits now, and its payload was discarded)
#   <------  Pushed      (the outcome of each sample)
#   <------  Feedback    (where the trainer is, when that changes)
#   <------  Dropped     (samples that were accepted will not be trained on)
#   <------  Advice      (for people: what is likely a mistake)
#   CloseGroup, EndPhase, EndStream -->


class Push(HasSamples, HasFields, code=5):
    """Samples, numbered in the order in which a producer pushes them; payload: their spans.

    tokens: of each sample; at most 1,024 samples, a larger batch in several pushes.
    first_seq: number of the first; the others follow.
    floor: the producer will never again send a number below this one.
    named: whether the user gave the sample ids: repeats across producers are then duplicates or
        conflicts.
    checksums: of each sample's content, if they are `named`: any number below 2^32 that is equal
        for equal content. A repeat with another checksum is a conflict; left out, none ever is.
    group_sizes: members of each sample's group, 0 where `CloseGroup` gives the size; left out where
        they are as configured.
    left_out: positions of these samples that `loss_mask` marks and `loss_tokens` does not count,
        for a metric.
    staleness_exempt: which samples may be trained on at any age, and need no policy version where
        `--max-staleness` is set; left out where none may.
    """

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
    """The trainer's progress, for producers with `feedback`; null: unchanged on this connection.

    policy_version: the last version that DP rank 0 has reported.
    expected_version: version that will train a sample pushed now, if samples go in order.
    remaining: samples (groups, where steps are counted in these) below the soft caps.
    """

    policy_version: Version | None = None
    expected_version: Version | None = None
    remaining: Count | None = None


class Pushed(HasFeedback, code=6, optional=("reasons",)):
    """The outcome of a push, and the trainer's progress.

    first_seq: of the push.
    outcomes: one per sample, or a single one for all of them: accepted, duplicate,
        conflict (a duplicate with other content: the first is kept), refused (never send it again)
        or full (send it again later).
    errors: message of each refused sample, by its index as a string.
    reasons: code of each refusal, likewise: a sample refused as `shutting-down` may be pushed again
        after a restart of the dispatcher, or elsewhere.
    staleness: of the push's oldest sample by now, in policy versions, to producers with
        `feedback`; null where that is not known.
    """

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


class Feedback(HasFeedback, code=26):
    """The trainer's progress has changed, and no `Pushed` is due that would carry it.

    Sent after the welcome too. Changes within 0.1 s are sent together.
    """


class Dropped(Message, code=27):
    """Samples of this producer that were accepted will never be trained on.

    Sent once, to a connected producer with `feedback`.

    reason: stale, incomplete-group and so on, as the metric of dropped samples has it.
    sample_ids: their ids, at most 1,024 in one message.
    group_ids: the group of each, null for none; left out where no sample has one.
    """

    reason: Name
    sample_ids: Annotated[list[Name], Declared(min_length=1, max_length=MAX_SAMPLES)]
    group_ids: list[Name | None] | None = None

    @model_validator(mode="after")
    def _lists_agree(self) -> Self:
        _check_lengths([("group_ids", self.group_ids)], len(self.sample_ids), "samples")
        return self


class Blocked(Message, code=7):
    """A cap of the buffer blocks a push.

    first_seq: of the push. Null while the dispatcher does not read from this producer because it
        receives frames of others; sent again with every heartbeat.
    cap: name of the cap.
    held: what the buffer holds, in the cap's unit.
    capacity: the cap, in the same unit.
    waits_for: what the next step waits for, in words.
    """

    first_seq: Count | None = None
    cap: str
    held: Count
    capacity: Count
    waits_for: str = ""


class CloseGroup(Message, code=8):
    """No further member of this group will come, or none beyond `size`.

    group_id: of the group.
    size: its final number of members; null: the members that were accepted.
    keep: whether an incomplete group is trained on rather than dropped; null: as configured.
    number: of this request at its producer; the dispatcher ignores repeats.
    withdrawn: if given, the group is not closed: the producer will not push the samples with these
        sequence numbers, at most 1,024 in one message. `size` is then the group's size as pushed
        with them, null if it is known only at close.
    """

    group_id: Name
    size: Extent | None = None
    keep: bool | None = None
    number: Count | None = None
    withdrawn: Annotated[list[Count], Declared(max_length=MAX_SAMPLES)] | None = None


class EndPhase(Message, code=9):
    """This producer pushes nothing older than a policy version any more.

    Once all producers that contributed to the run have sent it, older samples are trained before
    newer ones.

    policy_version: the version.
    force: no producer pushes anything older any more.
    """

    policy_version: Version
    force: bool = False


class EndStream(Message, code=10):
    """This producer pushes nothing any more.

    Once all producers that contributed have sent it, the dispatcher flushes its buffer and ends the
    ranks' streams.

    force: no producer pushes anything any more.
    """

    force: bool = False


class Resend(Message, code=24):
    """There is room for a blocked push whose payload was discarded: send it again.

    first_seq: of the push.
    """

    first_seq: Count


# -- DP ranks --------------------------------------------------------------------------------------
#
#   dispatcher               DP rank
#   <------   Demand, PolicyVersion
#   StepHeader     ------>
#   MicroBatch     ------>   (once per micro-batch, payload attached)
#   <------   Prepared, or Unresolved  (samples are gone: the step is planned anew)
#   StepWithdrawn  ------>   (no sample of the step is left)
#   Release        ------>   (every rank is prepared: the step may be trained)
#   LastStep       ------>   (another rank left: no later step may begin)
#   <------   Commit, CheckpointSaved  (with the step's times, if they are known by then)
#   <------   StepTimes                (otherwise)
#   Advice         ------>   (a hint for people)
#   <------   Finish           (instead of another Demand: the rank takes no further step)
#   End            ------>

#: Micro-batches of a rank in a step whose times can be reported.
MAX_TIMED = 1 << 16
#: Passes whose times a Commit can carry; most steps have one or two.
MAX_PASSES = 8
#: Bounded (to 31 years), so that sums and quotients stay finite.
Seconds = Annotated[float, Declared(ge=0, le=1e9, allow_inf_nan=False)]
Times = Annotated[list[Seconds], Declared(min_length=1, max_length=MAX_TIMED)]


class Demand(Message, code=11):
    """The state of a training loop.

    taken: last step that it has begun, -1 for none.
    hungry: whether it waits for the next one.
    """

    taken: Watermark
    hungry: bool


class PolicyVersion(Message, code=12):
    """DP rank 0 has a new version of the weights.

    policy_version: the version.
    first_step: the first step that trains with it.
    """

    policy_version: Version
    first_step: Count


class StepHeader(HasFields, code=13, optional=("attempt", "num_referenced")):
    """A step, before its micro-batches; the same on every DP rank.

    fields: of the samples of all its micro-batches.
    step: its number, from 0.
    digest: of its plan; a rank with another digest has another step.
    num_micro_batches: number of micro-batches, the same on every rank.
    num_samples: of all ranks.
    tokens: of all samples.
    loss_tokens: of all samples, for normalisation.
    loss_samples: samples with at least one loss token, for normalisation.
    group_loss_tokens: of each group, by its number in the step;
        a sample without a group is one of its own. Left out where no sample has one.
    expected_loss_tokens: loss tokens that `num_samples` mean arrivals have, fixed when the step was
        planned.
    attempt: number of times the step was planned anew because samples could not be resolved;
        messages of an earlier attempt are void. Left out if 0.
    num_referenced: samples of all ranks that lie in payload stores; left out if 0. If there are
        any, a rank is prepared once it holds all of its micro-batches, those samples fetched.
    """

    step: Count
    digest: Name
    num_micro_batches: Extent
    num_samples: Extent
    tokens: Total
    loss_tokens: Count
    loss_samples: Count
    group_loss_tokens: list[Count] | None = None
    expected_loss_tokens: Count | None = None
    attempt: Count = 0
    num_referenced: Count = 0


class MicroBatch(HasSamples, code=14, optional=("attempt", "cp_rank")):
    """One micro-batch of one DP rank; payload: a block per field, with its samples' values.

    step: number of its step.
    index: in the step, from 0; a rank receives micro-batches in order.
    is_filler: whether it is a dummy, so that ranks have equal numbers: the first token of some
        sample of the step, with no loss tokens.
    group_numbers: index of each sample's group in the step's `group_loss_tokens`; left out where
        there are no groups, and of a dummy.
    attempt: of the step, as in its header; left out if 0.
    cp_size: DP ranks of the block that trains it together: a power of two that divides the index of
        the first. All get it at the same index. Left out where the rank trains it alone.
    cp_rank: index of this rank in its block; the samples count for the first. Left out if 0.
    ranges: ranges of tokens of each sample whose per-token values the payload has, or the rank
        fetches, as pairs of start and stop; left out where these are all tokens.
    """

    each = (*HasSamples.each, "group_numbers", "ranges")
    step: Count
    index: Count
    is_filler: bool = False
    group_numbers: list[Count] | None = None
    attempt: Count = 0
    cp_size: Extent | None = None
    cp_rank: Count = 0
    ranges: list[list[Pair]] | None = None

    @property
    def tokens_held(self) -> list[int]:
        """Number of tokens of each sample on this rank."""
        if self.ranges is None:
            return self.tokens
        return [sum(stop - start for start, stop in own) for own in self.ranges]

    def spans(self, nbytes: int) -> tuple[int]:
        """One piece: its fields are checked against the step's header later."""
        return (nbytes,)


class Prepared(Message, code=15, optional=("attempt",)):
    """The rank holds a step's header and can train it. Sent in the order of steps.

    step: its number.
    digest: of its plan.
    attempt: of the step, as in its header; left out if 0. For an earlier attempt it is void.
    """

    step: Count
    digest: Name
    attempt: Count = 0


class Unresolved(Message, code=29):
    """The rank cannot get samples of a step that is not released.

    The dispatcher drops them with their groups, and plans the step anew as its next attempt.

    step: its number.
    attempt: of the step, as in its header; for an earlier attempt it is void.
    sample_ids: of these samples, at most 1,024 in one message.
    why: error of their store, for people.
    """

    step: Count
    attempt: Count
    sample_ids: Annotated[list[Name], Declared(min_length=1, max_length=MAX_SAMPLES)]
    why: Why = ""


class StepWithdrawn(Message, code=34):
    """No sample is left in a step that is not released.

    The rank drops the step, if it has it. A later attempt of the same number may follow.

    step: its number; no later step is announced.
    """

    step: Count


class Release(Message, code=16):
    """Every DP rank is prepared: the training loop may have a step.

    step: its number.
    """

    step: Count


class LastStep(Message, code=35):
    """Another DP rank has left or is lost: no step after this one may begin, prepared or not.

    A rank whose training loop asks for a later one sends `Demand`, and gets an `Error`.

    step: the last one, -1 for none at all; null: the rank is back, and the limit is lifted.
    """

    step: Watermark | None = None


class PassTimes(Part):
    """Times of one pass over a step's micro-batches.

    Times are in seconds, one per micro-batch in order, summed where the pass repeats them.

    cost_key: name of the pass: `update` trains, others (`log-prob`, `critic`) are the trainer's.
    busy_s: from each micro-batch's begin to its end, including time in collectives; 0 where that is
        not known.
    collective_s: the part of it in collectives, whether waiting for other ranks or transferring;
        null where that cannot be measured.
    why: why it cannot, for people.
    """

    cost_key: Name = UPDATE
    busy_s: Times
    collective_s: Times | None = None
    why: Annotated[str, Declared(max_length=200)] = ""

    @model_validator(mode="after")
    def _one_a_micro_batch(self) -> Self:
        _check_lengths([("collective_s", self.collective_s)], len(self.busy_s), "micro-batches")
        return self


class Commit(Message, code=17):
    """The rank has applied every step up to one.

    step: the last of them.
    times: of passes over that step, as far as they are known, for at most 65,536 micro-batches
        altogether. Others follow in StepTimes.
    """

    step: Count
    times: Annotated[list[PassTimes], Declared(min_length=1, max_length=MAX_PASSES)] | None = None

    @model_validator(mode="after")
    def _as_many_as_alone(self) -> Self:
        if self.times is not None and sum(len(each.busy_s) for each in self.times) > MAX_TIMED:
            raise ValueError(f"times of more than {MAX_TIMED} micro-batches")
        return self


class End(Message, code=18):
    """No step will follow.

    reason: `finished`: the DP ranks have finished the run, and later steps are void; `ended`:
        producers or a controller have ended the stream; `drained`: the dispatcher shuts down. In
        these two cases announced steps still follow.
    """

    reason: Annotated[EndReason, Declared(strict=False)]


class Finish(Message, code=36):
    """The training loop takes no further step.

    Once every DP rank has sent it with the same content, the run is finished, and all get an `End`.
    Where they differ, or one rank goes on, all get an `Error`.

    step: the last one that the rank has committed, -1 for none.
    discard: unused samples are dropped, though a journal could keep them.
    """

    step: Watermark
    discard: bool = False


class CheckpointSaved(Message, code=23):
    """A checkpoint is durable; DP rank 0 reports it for all.

    step: the last step that is in it, -1 for none.
    """

    step: Watermark


class StepTimes(PassTimes, Message, code=28):
    """Times of one pass over a step's micro-batches.

    Sent once per pass, with or after the step's Commit, unless the Commit has them. Nothing waits
    for it.

    step: its number.
    """

    step: Count
