"""`MicroBatch`: the input of a training loop, also for Hugging Face models and as a TensorDict."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.sample import CU_ROWS
from rollout_workers.micro_batch import layouts
from rollout_workers.micro_batch.blocks import ALONE, ContextBlock
from rollout_workers.micro_batch.layouts import (
    IGNORED,
    LABELS,
    OF_LAYOUT,
    Collation,
    Placement,
    Side,
)

if TYPE_CHECKING:
    import torch.distributed as dist
    from tensordict import TensorDict


@dataclass(frozen=True, eq=False)
class MicroBatch(MutableMapping[str, Tensor]):
    """The input of one DP rank's forward and backward pass, of `n` samples.

    A mapping of its tensors by name (`micro_batch["logprobs"]`, `keys()`, `**micro_batch`), so that
    `len()` is their number, and a node of torch's pytrees, whose leaves they are. A tensor is an
    attribute too, unless the name is taken below: `micro_batch.logprobs`. One that is put in
    (`micro_batch["advantages"] = ...`) goes along with the others, per token if it has their shape.

    Per-token tensors are [total, ...] packed, [n, longest, ...] padded with zeros, or nested
    [n, jagged, ...]; per-sample ones [n, ...]; ragged ones [rows of all samples, ...] in every
    layout.

        input_ids, position_ids  int64, per token; positions restart at 0 with every sample
        loss_weights             `weights_dtype`, per token: weight of the loss of predicting this
                                 token from those before it in its sample, by the `loss_mask`;
                                 the first token of each sample has weight 0
        NAME_weights             the same for each of the stream's other `losses`
        cu_seqlens               packed and jagged: int32 [n + 1], where each sample starts
        attention_mask           padded: bool [n, longest], true on tokens
        NAME_cu_rows             of each ragged field: int32 [n + 1], where the rows of each sample
                                 begin in it: `pixel_values[cu[i]:cu[i + 1]]` are sample i's

    With a multiple for samples' lengths, or a fixed packed length, packed ones have padding too: it
    is zero, and weighs nothing; it lies behind each sample's tokens, in its segment of
    `cu_seqlens`, and positions count on in it. What lacks to the fixed length then is a last
    segment, so that `cu_seqlens` is [n + 2].

        cu_seqlens_unpadded      int32, of the length of cu_seqlens: the same without padding.
                                 TransformerEngine calls this cu_seqlens_q, and cu_seqlens
                                 cu_seqlens_q_padded

    Of a stream with `max_split` there is `next_NAME` beside each per-token NAME but `position_ids`
    and `labels`: of the token that the row predicts, 0 for the last of a sample. A micro-batch that
    `cp_size` ranks train together has this rank's rows of each sample alone, of which each is
    padded to a multiple of 2 * cp_size; cu_seqlens, cu_seqlens_unpadded and max_seqlen are of whole
    samples, of whose padded rows each rank has 1 / cp_size. What is per sample is on all of its
    ranks, and counts where `owns_samples` is.

    text: of each field of text the n texts: `micro_batch.text["env"]`.
    loss_scale: factor of the summed, weighted token losses, to apply exactly once; the library
        cannot detect a missing or doubled one.
    loss_scales: the factor of every loss by its name, for the sum of its token losses weighted by
        `NAME_weights`; that of the main one, `loss`, is `loss_scale`.
    tokens: real tokens, without padding, of this rank's rows.
    is_last: the step's last on this rank, where gradients are synchronised.
    is_filler: one token of no weight, so that this rank joins the others' backward pass.
    per_token: names of the per-token tensors. placement: where samples lie in them.
    block: the ranks that train it together.
    """

    tensors: dict[str, Tensor] = field(repr=False)
    step: int
    index: int
    tokens: int
    loss_scale: float
    loss_scales: Mapping[str, float]
    is_last: bool
    is_filler: bool
    sample_ids: tuple[str, ...]
    group_ids: tuple[str | None, ...]
    policy_versions: tuple[int | None, ...]
    per_token: frozenset[str] = field(repr=False)
    placement: Placement = field(repr=False)
    text: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    block: ContextBlock = field(default=ALONE, repr=False)

    # -- a mapping

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        before = self.tensors.get(name)
        self.tensors[name] = tensor
        if before is None or before.shape != tensor.shape:  # else it is what that was
            others = self.per_token - {name}
            per_token = others | {name} if self.placement.is_of(tensor) else others
            self.__dict__["per_token"] = per_token
        self.__dict__.pop("labels", None)  # which was made of what was there before

    def __delitem__(self, name: str) -> None:
        del self.tensors[name]
        self.__dict__.pop("labels", None)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __copy__(self) -> Self:
        return replace(self, tensors=dict(self.tensors))

    def __getattr__(self, name: str) -> Tensor:
        tensors = self.__dict__.get("tensors", {})
        if name not in tensors:
            raise AttributeError(
                f"this micro-batch has no {name!r}; its tensors are {', '.join(tensors)}"
            )
        found: Tensor = tensors[name]
        return found

    def __eq__(self, other: object) -> bool:
        """Whether it is the same object, as with modules; tensors are compared one by one."""
        return self is other

    def __hash__(self) -> int:
        return id(self)

    # -- what it is

    @property
    def num_samples(self) -> int:
        """Its samples, `n`; 1 for a filler."""
        return len(self.sample_ids)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample, without padding."""
        return self.placement.tokens

    @property
    def max_seqlen(self) -> int:
        """Rows of the longest segment, padding included, for attention kernels."""
        return self.placement.longest * self.block.size

    @property
    def cp_size(self) -> int:
        """DP ranks that train it together, each on its slices of the samples."""
        return self.block.size

    @property
    def cp_rank(self) -> int:
        """This rank's place among them."""
        return self.block.rank

    @property
    def cp_group(self) -> "dist.ProcessGroup | None":
        """Their process group, in the order of their places; None where there is one."""
        return self.block.group

    @property
    def owns_samples(self) -> bool:
        """Whether losses that count once a sample count here: on the first rank of its block."""
        return self.block.rank == 0

    @property
    def layout(self) -> Collation:
        """How it is laid out: `packed`, `padded` or `jagged`."""
        return self.placement.layout

    @cached_property
    def labels(self) -> Tensor:
        """`input_ids` where the loss counts, else -100; int64, laid out as they are.

        Label i is predicted from the tokens before i, which is what Hugging Face models expect:
        they shift by themselves. The first token of a sample has none before it, and so no label.
        A field `labels` of the samples' own is not touched.
        """
        if LABELS in self.tensors:
            return self.tensors[LABELS]
        self._need_whole("labels are of whole samples (`next_input_ids` are there instead)")
        if self.layout is Collation.JAGGED:
            return self._relaid(self.placement, labels=self.as_packed().labels)[LABELS]
        return labels_of(self["input_ids"], self.tensors.get("loss_mask"), self.placement)

    # -- elsewhere, or of another type

    def to(
        self,
        device: torch.device | str | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> Self:
        """The same on another device, as `Tensor.to`; its tensors may be this one's.

        dtype: for floating-point tensors, as `Module.to`, but for the weights of losses, which keep
        theirs (`weights_dtype`): a share of a long sample is nothing in 16 bits. It may come first.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device

        weights = {f"{loss}_weights" for loss in self.loss_scales}

        def moved(name: str, tensor: Tensor) -> Tensor:
            casts = tensor.is_floating_point() and name not in weights
            kind = dtype if casts else None
            return tensor.to(device=device, dtype=kind, non_blocking=non_blocking)

        return self._mapped(moved)

    def pin_memory(self) -> Self:
        """The same in page-locked memory, from which GPUs copy by themselves."""
        return self._mapped(lambda _, tensor: tensor.pin_memory())

    def _mapped(self, function: Callable[[str, Tensor], Tensor]) -> Self:
        return replace(
            self, tensors={name: function(name, tensor) for name, tensor in self.tensors.items()}
        )

    # -- in another layout

    def as_packed(self, *, multiple_of: int = 1, length: int | None = None) -> Self:
        """Samples end to end; its tensors may share memory with this one's.

        multiple_of: each sample is padded to a multiple of so many tokens.
        length: then all of them together to so many. Raises ValueError if they are more already.
        """
        tokens = list(self.lengths)
        there = layouts.packed(tokens, layouts.checked(multiple_of), length)
        if length is not None and there.rows > length:
            raise ValueError(f"{there.rows} tokens do not fit a packed length of {length}")
        return self._in(there)

    def as_padded(self, *, side: str = "right", multiple_of: int = 1) -> Self:
        """A row a sample, in memory of its own.

        side: where the padding is, `right` or `left`. multiple_of: of the length of rows.
        """
        return self._in(
            layouts.padded(list(self.lengths), layouts.checked(multiple_of), Side(side))
        )

    def as_jagged(self) -> Self:
        """Nested tensors; they may share memory with this one's."""
        return self._in(layouts.jagged(list(self.lengths)))

    def _need_whole(self, what: str) -> None:
        if self.block.size > 1:
            raise ConfigError(
                f"{what}, and this micro-batch has slices of its samples, which {self.block.size} "
                "DP ranks train together; use its tensors as they are, or start the dispatcher "
                "with --set max-split=1"
            )

    def _in(self, placement: Placement) -> Self:
        self._need_whole("layouts are of whole samples")
        if placement == self.placement and placement.layout is not Collation.PADDED:
            return copy(self)
        own = self._relaid(placement)
        rest = {
            name: tensor
            for name, tensor in self.tensors.items()
            if name not in self.per_token and name not in OF_LAYOUT
        }
        return replace(self, tensors=own | rest, placement=placement)

    def _relaid(self, placement: Placement, **packed: Tensor) -> dict[str, Tensor]:
        """Per-token tensors, and others that are dense, in another layout."""
        tokens = {
            name: layouts.dense(tensor, self.placement)
            for name, tensor in self.tensors.items()
            if name in self.per_token
        }
        device = next((tensor.device for tensor in self.tensors.values()), layouts.CPU)
        return layouts.lay_out(tokens | packed, placement, device)

    # -- for other libraries

    def as_hf(self) -> dict[str, Tensor | int]:
        """Arguments of a Hugging Face model: `model(**micro_batch.as_hf())`.

        Packed and jagged, as its flash-attention path (`FlashAttentionKwargs`) has it:

            input_ids, position_ids, labels  int64 [1, rows]
            cu_seq_lens_q, cu_seq_lens_k     int32, `cu_seqlens`
            max_length_q, max_length_k       int, `max_seqlen`
            use_cache                        False: with a cache, as models have by default, eager
                                             and SDPA attention would look across samples; without
                                             one they find them by `position_ids`

        Padded: input_ids, position_ids, labels and attention_mask, int64 [n, longest].

        The model shifts `labels` itself, and divides by their number in this micro-batch; so that
        the loss is the whole step's token-mean instead (of a stream with that normalisation), write

            loss = model(**micro_batch.as_hf(), num_items_in_batch=1).loss * micro_batch.loss_scale

        Without `num_items_in_batch` a filler's loss is NaN: none of its labels counts.
        """
        batch = self.as_packed() if self.layout is Collation.JAGGED else self
        ids = {name: batch[name] for name in ("input_ids", "position_ids")}
        found = {**ids, "labels": batch.labels}
        if batch.layout is Collation.PADDED:
            return {**found, "attention_mask": batch["attention_mask"].long()}
        starts, longest = batch["cu_seqlens"], batch.max_seqlen
        return {
            **{name: tensor[None] for name, tensor in found.items()},
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts,
            "max_length_q": longest,
            "max_length_k": longest,
            "use_cache": False,
        }

    def as_tensordict(self) -> "TensorDict":
        """Its tensors as a TensorDict, of batch size [n], where ragged ones are nested; packed: [].

        Raises ImportError without the package `tensordict`.
        """
        try:
            from tensordict import TensorDict  # noqa: PLC0415  nothing else needs it
        except ModuleNotFoundError as error:
            raise ImportError(
                "as_tensordict() needs tensordict, which is not installed here; install it with "
                "pip install tensordict",
                name="tensordict",
            ) from error
        if self.layout is Collation.PACKED:
            return TensorDict(dict(self), batch_size=[])
        return TensorDict(by_sample(self), batch_size=[self.num_samples])


#: Fields that are no tensors, and stay as they are when a function is mapped over the tensors.
_FACTS = tuple(each.name for each in fields(MicroBatch) if each.name != "tensors")


def _flatten(batch: MicroBatch) -> tuple[list[Tensor], tuple[Any, ...]]:
    facts = tuple(getattr(batch, name) for name in _FACTS)
    return list(batch.tensors.values()), (tuple(batch.tensors), facts)


def _unflatten(leaves: Any, context: tuple[Any, ...]) -> MicroBatch:
    names, facts = context
    tensors = dict(zip(names, leaves, strict=True))
    return MicroBatch(tensors, **dict(zip(_FACTS, facts, strict=True)))


pytree.register_pytree_node(
    MicroBatch, _flatten, _unflatten, serialized_type_name="rollout_workers.MicroBatch"
)


def labels_of(ids: Tensor, loss_mask: Tensor | None, placement: Placement) -> Tensor:
    """See `MicroBatch.labels`; laid out as the ids are, packed or padded."""
    rows = layouts.as_rows(ids, placement)
    if loss_mask is not None:
        counts = layouts.as_rows(loss_mask, placement) != 0
    else:
        counts = torch.zeros_like(rows, dtype=torch.bool)
        counts[layouts.index(placement.rows_of_tokens, rows)] = True
    counts[layouts.index(placement.starts, rows)] = False
    return rows.masked_fill(~counts, IGNORED).view_as(ids)


def by_sample(batch: MicroBatch) -> dict[str, Tensor]:
    """Tensors of n rows, of a padded or jagged one; ragged ones are nested tensors."""
    rows = {name: tensor for name, tensor in batch.items() if name != "cu_seqlens"}
    for name in [name for name in rows if name + CU_ROWS in rows]:
        starts = rows.pop(name + CU_ROWS).long()
        rows[name] = torch.nested.nested_tensor_from_jagged(rows[name], starts)
    return rows
