"""Samples whose spans lie in a payload store before they are pushed."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import index
from typing import SupportsIndex

from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.payload import Reference, StoredObject
from rollout_dispatcher.sample import Schema
from rollout_workers.metadata import GroupSize, size_of
from rollout_workers.producer.encode import EncodedSample
from rollout_workers.producer.layout import layout_of


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


def encode(
    samples: Iterable[ReferencedSample], allowed: Collection[str], group_size: GroupSize | None
) -> list[EncodedSample]:
    """What is pushed of them. allowed: the payload stores that they may lie in.

    Raises SampleRefused for what cannot be as it is said.
    """
    return [_encoded(at, sample, allowed, group_size) for at, sample in enumerate(samples)]


def _encoded(
    at: int, given: object, allowed: Collection[str], group_size: GroupSize | None
) -> EncodedSample:
    if not isinstance(given, ReferencedSample):
        kind = type(given).__name__
        raise SampleRefused("bad-sample", f"sample {at} is no ReferencedSample but {kind}")
    given = _typed(at, given)
    schema, reference = given.schema, given.reference
    _check_schema(at, schema)
    if set(given.rows) != set(schema.ragged):
        raise SampleRefused(
            "bad-metadata",
            f"sample {at} has rows of {sorted(given.rows)}, its ragged fields are "
            f"{sorted(schema.ragged)}",
        )
    rows = tuple([given.rows[name] for name in schema.ragged])
    _check_counts(at, given)
    nbytes = schema.nbytes(given.tokens, rows)
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
    return EncodedSample(
        schema, given.tokens, given.loss_tokens, [], 0, given.sample_id, given.group_id,
        None if size is None else size_of(size, given.group_id), given.policy_version, rows,
        reference, staleness_exempt=given.staleness_exempt,
    ).summed()  # fmt: skip


def _typed(at: int, given: ReferencedSample) -> ReferencedSample:
    """The same, in whole numbers of Python's, where they may come from arrays."""
    reference = given.reference
    _check_kind(at, "reference", reference, Reference)
    _check_kind(at, "reference's object", reference.stored, StoredObject)
    _check_kind(at, "schema", given.schema, Schema)
    _check_kind(at, "rows", given.rows, Mapping)
    stored = reference.stored
    stored = replace(stored, nbytes=_whole(at, "object's bytes", stored.nbytes))
    return replace(
        given,
        reference=Reference(
            stored, _whole(at, "offset", reference.offset), _whole(at, "bytes", reference.nbytes)
        ),
        tokens=_whole(at, "tokens", given.tokens),
        loss_tokens=_whole(at, "loss_tokens", given.loss_tokens),
        rows={name: _whole(at, f"rows of {name}", rows) for name, rows in given.rows.items()},
    )


def _check_kind(at: int, what: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise SampleRefused(
            "bad-sample",
            f"the {what} of sample {at} is no {kind.__name__} but {type(value).__name__}",
        )


def _whole(at: int, what: str, value: SupportsIndex) -> int:
    try:
        return index(value)
    except TypeError:
        raise SampleRefused(
            "bad-metadata", f"the {what} of sample {at} must be a whole number, not {value!r:.100}"
        ) from None


def _check_schema(at: int, schema: Schema) -> None:
    if "input_ids" not in schema.by_name:
        raise SampleRefused("no-input-ids", f"sample {at} has no field input_ids")
    layout_of(schema, "push_references")


def _check_counts(at: int, given: ReferencedSample) -> None:
    if given.tokens < 1 or not 0 <= given.loss_tokens < given.tokens:
        raise SampleRefused(
            "bad-metadata",
            f"sample {at} has {given.tokens} tokens, of which {given.loss_tokens} count for the "
            "loss; a sample has one token at least, and the loss counts all but the first at most",
        )
    if min(given.rows.values(), default=0) < 0:
        raise SampleRefused("bad-metadata", f"sample {at} has {min(given.rows.values())} rows")
