"""Encodes a rollout worker's samples: the arrays of a span end to end, none of them copied.

A sample's span is its fields' memory with zeros between them. Sending reads that memory, so it must
not change until the sample is answered.

Numbers of metadata may be numpy's or torch's. Metadata that the dispatcher would misunderstand are
refused here, where their names are known: a `group_size` of 0 would be a group that is never whole.
"""

import logging
import operator
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.payload import Reference
from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.outbox import Buffer
from rollout_dispatcher.sample import Schema, content_checksum
from rollout_dispatcher.spans import ALIGNMENT, PADDING
from rollout_workers.producer.layout import Array, ArrayLike, Layout, Named, lay_out, layout_of

log = logging.getLogger(__name__)


#: Members of a group: a number, or `at-close` where `close_group` gives it.
GroupSize = int | Literal["at-close"]
AT_CLOSE: Literal["at-close"] = "at-close"
SIZE_AT_CLOSE = 0

#: Columns of a push, and the users' name of a value of one.
_CALLED = {
    "sample_ids": "sample_id",
    "group_ids": "group_id",
    "group_sizes": "group_size",
    "policy_versions": "policy_version",
    "staleness_exempt": "staleness_exempt",
}


def version_of(given: Any) -> int:
    """A policy version. Raises SampleRefused if it is no whole number."""
    return _whole("policy_version", given)


def size_of(given: Any, group_id: str | None) -> int:
    """The size of a sample's group. Raises SampleRefused if no group can have it."""
    at_close = isinstance(given, str) and given == AT_CLOSE
    size = SIZE_AT_CLOSE if at_close else _whole("group_size", given)
    if size < 1 and not at_close:
        raise SampleRefused(
            "bad-metadata",
            f"group_size is {size}; write how many samples the group has in all, or {AT_CLOSE!r} "
            "if close_group tells it",
        )
    if group_id is None and size != 1:
        raise SampleRefused(
            "bad-metadata",
            f"group_size is {given}, and no group_id says which samples belong together",
        )
    return size


def refusal(fault: Mapping[str, Any]) -> SampleRefused:
    """The refusal for a fault of a push's column, by the users' name of it."""
    place = ".".join(str(part) for part in fault["loc"])
    name = _CALLED.get(str(fault["loc"][0])) if fault["loc"] else None
    where = f"{name} is {reprlib.repr(fault['input'])}" if name else place
    return SampleRefused("bad-metadata", f"{where}: {fault['msg']}")


def _whole(name: str, given: Any) -> int:
    try:
        return operator.index(given)
    except TypeError:
        kind = type(given).__name__
        raise SampleRefused(
            "bad-metadata", f"{name} is {reprlib.repr(given)}, a {kind}; write a whole number"
        ) from None


#: Types of policy versions that are sent as they are.
_PLAIN = frozenset({int, type(None)})


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One finished rollout, as `push_many` and `push_group` take it.

    fields: `input_ids` [tokens] and any others. `loss_mask` [tokens] of zeros and ones: with
        `loss_mask[i]` token i is a target of the loss, that is, predicted from the tokens before it
        in its sample; without a mask all tokens are. The first token never is, whatever the mask
        says. Weights of other values are a field of their own. A str is one text a
        sample. Large arrays and tensors are sent from where they are: leave them as they are until
        the push has returned or raised.
    group_id: names one group of the run; further samples of its prompt, as in another epoch, are a
        group of another id (`f"{prompt}@{epoch}"`).
    group_size: members that the group will have in the end, or `at-close` if nobody knows before
        `close_group`.
    policy_version: version of the weights that generated the oldest token.
    staleness_exempt: it may be trained on however old it is (demonstrations, replay). Where the
        dispatcher has a `--max-staleness` every other sample needs a `policy_version`.
    """

    fields: Mapping[str, ArrayLike]
    sample_id: str | None = None
    group_id: str | None = None
    group_size: GroupSize | None = None
    policy_version: int | None = None
    staleness_exempt: bool = False


#: What may be pushed: a mapping of fields is a sample without metadata.
Pushable = RolloutSample | Mapping[str, ArrayLike]


class EncodedSample(NamedTuple):
    """A sample ready to be sent.

    arrays: its fields in the order of `schema`, C-contiguous and little-endian; the caller's own
        memory mostly. nbytes: bytes of its span, `schema.nbytes(tokens, rows)`. group_size: 0 if
        `close_group` gives it. rows: of each ragged field, in the order of `schema`.
        reference: where the span is if it lies in a payload store; no arrays and no bytes then.
        left_out: tokens that the mask marks and `loss_tokens` leaves out, 0 or 1.
        checksum: of its content, if the user gave its id.
    """

    schema: Schema
    tokens: int
    loss_tokens: int
    arrays: list[Array]
    nbytes: int
    sample_id: str | None = None
    group_id: str | None = None
    group_size: int | None = None
    policy_version: int | None = None
    rows: tuple[int, ...] = ()
    reference: Reference | None = None
    left_out: int = 0
    staleness_exempt: bool = False
    checksum: int | None = None


class EncodedSamples(NamedTuple):
    """Samples of one push, field by field in the order of `EncodedSample`."""

    schemas: list[Schema]
    tokens: list[int]
    loss_tokens: list[int]
    arrays: list[list[Array]]
    nbytes: list[int]
    sample_ids: list[Any]
    group_ids: list[str | None]
    group_sizes: list[int | None]
    policy_versions: list[int | None]
    rows: list[tuple[int, ...]]
    references: list[Reference | None]
    left_out: list[int]
    staleness_exempt: list[bool]
    checksums: list[Any]

    @classmethod
    def of(cls, samples: Iterable[EncodedSample]) -> Self:
        """These samples, which takes some twentieth of a microsecond each."""
        return cls(*map(list, zip(*samples, strict=True)))


#: The sample of these values: `EncodedSample._make` without its check of their number.
_ENCODED = partial(tuple.__new__, EncodedSample)


def _checksum(sample_id: str | None, arrays: Iterable[Array], *facts: object) -> int | None:
    """`content_checksum` of a sample whose id the user gave, None for any other."""
    return None if sample_id is None else content_checksum(_pieces(arrays), *facts)


def _pieces(arrays: Iterable[Array]) -> Iterator[Buffer]:
    """The pieces of a span: arrays, and zeros up to where the next one begins."""
    for array in arrays:
        yield array.data
        if padding := PADDING[array.nbytes % ALIGNMENT]:
            yield padding


def rollout_samples(given: object) -> list[RolloutSample]:
    """What a user pushed, as samples; raises SampleRefused for anything else."""
    if isinstance(given, (RolloutSample, Mapping)):
        raise SampleRefused(
            "bad-sample", "a single sample where many belong; push it with push(), or in a list"
        )
    if not isinstance(given, Iterable):
        raise SampleRefused("bad-sample", f"{type(given).__name__} is no list of samples")
    return [
        item if type(item) is RolloutSample else _rollout_sample(index, item)
        for index, item in enumerate(given)
    ]


def _rollout_sample(index: int, given: object) -> RolloutSample:
    if isinstance(given, RolloutSample):
        return given
    if isinstance(given, Mapping):
        return RolloutSample(given)
    raise SampleRefused(
        "bad-sample",
        f"sample {index} is no sample but {type(given).__name__}; push mappings of fields, or "
        "RolloutSample where there is metadata",
    )


class Encoder:
    """Encodes samples, faster the more they are alike; safe to share by threads.

    per_sample: names of fields that have one value a sample although they have dimensions.
    ragged: names of fields whose first dimension is a number of rows of each sample's own.
    loss_mask_shifted: whether `loss_mask[i]` judges token i + 1. It is sent with i for token i, so
        that the dispatcher and ranks know one convention only.
    allow_non_finite: whether numbers of tokens and samples may be NaN or infinite.
    """

    def __init__(
        self,
        per_sample: Collection[str] = (),
        ragged: Collection[str] = (),
        *,
        loss_mask_shifted: bool = False,
        allow_non_finite: bool = False,
    ) -> None:
        self._allow_non_finite = allow_non_finite
        self._named = Named.of(per_sample, ragged)
        self._loss_mask_shifted, self._warned = loss_mask_shifted, False
        # Two, as one thread sets the run's schema while others encode.
        self._known: Layout | None = None  # of the run's samples
        self._latest: Layout | None = None  # of the sample before, while those are not known

    def on_schema(self, known: m.SchemaKnown | None) -> None:
        """Convert values to the types of the run's schema from now on.

        None: the schema is not decided yet, as in a new run.
        """
        layout = None
        if known is not None:
            with suppress(SampleRefused):  # other clients' rules; no sample of ours has such fields
                layout = layout_of(known.schema_, known.set_by)
        self._known = layout

    def encode(self, samples: Iterable[RolloutSample]) -> list[EncodedSample]:
        """Check samples and find the memory of their fields.

        Raises SampleRefused that names the field and what is wrong with it.
        """
        with np.errstate(over="ignore"):  # of `Layout.check_finite`
            return list(map(self._encoded, samples))

    def _encoded(self, sample: RolloutSample) -> EncodedSample:
        fields: object = sample.fields
        if type(fields) is not dict and not isinstance(fields, Mapping):
            kind, metadata = type(fields).__name__, isinstance(fields, RolloutSample)
            remedy = "push it with push_many([sample])" if metadata else "push names to tensors"
            raise SampleRefused("bad-sample", f"the fields are no mapping but {kind}; {remedy}")
        layout, arrays = self._lay_out(sample.fields)
        ids = arrays[layout.ids]
        layout.check_ids(ids)
        if not self._allow_non_finite:
            layout.check_finite(arrays)
        tokens = len(ids)
        if self._loss_mask_shifted and layout.mask is not None:
            # The last position, which judges a token that is not there, is left out as the first.
            arrays[layout.mask] = np.roll(arrays[layout.mask], 1)
        loss_tokens, left_out = layout.loss_tokens(arrays, tokens)
        if left_out and not self._loss_mask_shifted:
            self._warn()
        rows = layout.rows(arrays) if layout.ragged else ()
        sample_id, group_id, size = sample.sample_id, sample.group_id, sample.group_size
        version = sample.policy_version
        if type(version) not in _PLAIN:
            version = version_of(version)
        return _ENCODED((
            layout.schema, tokens, loss_tokens, arrays, layout.schema.nbytes(tokens, rows),
            sample_id, group_id, None if size is None else size_of(size, group_id), version, rows,
            None, left_out, sample.staleness_exempt,
            _checksum(sample_id, arrays, tokens, rows, group_id, version),
        ))  # fmt: skip

    def _warn(self) -> None:
        """Log once that a mask marks first tokens: it may be shifted."""
        if self._warned:
            return
        self._warned = True
        log.warning(
            "loss_mask marks the first token of a sample, which no token before it predicts: it is "
            "left out of the loss, here and in every sample. If loss_mask[i] is meant for token "
            "i + 1, make the producer with loss_mask_shifted=True"
        )

    def _lay_out(self, fields: Mapping[str, ArrayLike]) -> tuple[Layout, list[Array]]:
        known = self._known
        layout = self._latest if known is None else known
        if layout is not None and (arrays := layout.arrays(fields)) is not None:
            return layout, arrays
        found = lay_out(fields, self._named, known)
        if known is None:
            self._latest = found[0]
        return found


@dataclass(frozen=True, slots=True)
class ReferencedSample:
    """One finished rollout that lies in a payload store, as `push_references` takes it.

    reference: where its span is: the fields of `schema` one after the other, each at a multiple of
        8 bytes from its beginning, with zeros between; `schema.nbytes(tokens, rows)` bytes.
        Whoever pushes it gives the whole object away: it is released once the dispatcher needs
        none of the samples that were pushed of it.
    tokens, loss_tokens: how many it has, and how many of them the loss counts: of those that its
        `loss_mask` marks all but the first token, which is never a target; without a mask
        `tokens - 1`.
    rows: of each ragged field by its name, those of this sample.
    others: as those of `RolloutSample`.
    """

    reference: Reference
    schema: Schema
    tokens: int
    loss_tokens: int
    rows: Mapping[str, int] = field(default_factory=dict)
    sample_id: str | None = None
    group_id: str | None = None
    group_size: GroupSize | None = None
    policy_version: int | None = None
    staleness_exempt: bool = False


def encode_references(
    samples: Iterable[ReferencedSample], allowed: Collection[str], group_size: GroupSize | None
) -> list[EncodedSample]:
    """The samples to push. allowed: the payload stores that they may lie in.

    Raises SampleRefused for contradictory facts of a sample.
    """
    return [_encoded(at, sample, allowed, group_size) for at, sample in enumerate(samples)]


def _encoded(
    at: int, given: object, allowed: Collection[str], group_size: GroupSize | None
) -> EncodedSample:
    if not isinstance(given, ReferencedSample):
        kind = type(given).__name__
        raise SampleRefused("bad-sample", f"sample {at} is no ReferencedSample but {kind}")
    schema, reference = given.schema, given.reference
    if "input_ids" not in schema.by_name:
        raise SampleRefused("no-input-ids", f"sample {at} has no field input_ids")
    layout_of(schema, "push_references")
    if set(given.rows) != set(schema.ragged):
        raise SampleRefused(
            "bad-metadata",
            f"sample {at} has rows of {sorted(given.rows)}, its ragged fields are "
            f"{sorted(schema.ragged)}",
        )
    # They may come from arrays.
    tokens, loss_tokens, *rows = map(
        operator.index,
        (given.tokens, given.loss_tokens, *(given.rows[name] for name in schema.ragged)),
    )
    if tokens < 1 or not 0 <= loss_tokens < tokens:
        raise SampleRefused(
            "bad-metadata",
            f"sample {at} has {tokens} tokens, of which {loss_tokens} count for the loss; a "
            "sample has one token at least, and the loss counts all but the first at most",
        )
    if min(rows, default=0) < 0:
        raise SampleRefused("bad-metadata", f"sample {at} has {min(rows)} rows")
    nbytes = schema.nbytes(tokens, rows)
    end = reference.offset + reference.nbytes
    if reference.nbytes != nbytes or reference.offset < 0 or end > reference.stored.nbytes:
        raise SampleRefused(
            "bad-metadata",
            f"sample {at} takes {nbytes} bytes with these fields and counts, and its reference is "
            f"to {reference.nbytes} bytes at {reference.offset} of {reference.stored.nbytes}",
        )
    if reference.stored.store not in allowed:
        raise SampleRefused(
            "unknown-store",
            f"sample {at} lies in {reference.stored.store}, which is not allowed here (allowed: "
            f"{', '.join(sorted(allowed)) or 'none'}); start the dispatcher with it in "
            "--payload-stores, or push the sample itself",
        )
    size = given.group_size
    if size is None and given.group_id is not None:
        size = group_size
    sample_id, group_id, version = given.sample_id, given.group_id, given.policy_version
    return EncodedSample(
        schema, tokens, loss_tokens, [], 0, sample_id, group_id,
        None if size is None else size_of(size, group_id), version, tuple(rows),
        reference, staleness_exempt=given.staleness_exempt,
        checksum=_checksum(sample_id, (), tokens, tuple(rows), group_id, version),
    )  # fmt: skip
