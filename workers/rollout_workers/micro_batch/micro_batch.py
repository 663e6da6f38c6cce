"""`MicroBatch`: what a training loop gets."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """What one DP rank feeds to one forward and backward pass of `n` samples.

    tensors: every tensor by name, also reachable as `micro_batch["logprobs"]` and, unless the name
    is taken below, `micro_batch.logprobs`. Per-token tensors are [total, ...] packed,
    [n, longest, ...] padded with zeros, or nested [n, jagged, ...]; per-sample ones [n, ...];
    ragged ones [rows of all samples, ...] in every layout.

        input_ids, position_ids  int64, per token; positions restart at 0 with every sample
        loss_weights             `weights_dtype`, per token: weight of the loss of predicting this
                                 token from those before it in its sample. By the `loss_mask`;
                                 without one the first token of each sample has weight 0
        cu_seqlens               packed and jagged: int32 [n + 1], where each sample starts
        attention_mask           padded: bool [n, longest], true on tokens
        NAME_cu_rows             of each ragged field: int32 [n + 1], where the rows of each sample
                                 begin in it: `pixel_values[cu[i]:cu[i + 1]]` are sample i's

    text: of each field of text the n texts: `micro_batch.text["env"]`.
    loss_scale: factor of the summed, weighted token losses, to apply exactly once; whether it was,
        nobody can see from here. See the module's invariant.
    tokens: real tokens, without padding. max_seqlen: tokens of the longest sample.
    is_last: the step's last on this rank, where gradients are synchronised.
    is_filler: one token of no weight, so that this rank joins the others' backward pass.
    """

    tensors: Mapping[str, Tensor] = field(repr=False)
    step: int
    index: int
    tokens: int
    max_seqlen: int
    loss_scale: float
    is_last: bool
    is_filler: bool
    sample_ids: tuple[str, ...]
    group_ids: tuple[str | None, ...]
    policy_versions: tuple[int | None, ...]
    text: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __getattr__(self, name: str) -> Tensor:
        tensors = self.__dict__.get("tensors", {})
        if name not in tensors:
            raise AttributeError(
                f"this micro-batch has no {name!r}; its tensors are {', '.join(tensors)}"
            )
        found: Tensor = tensors[name]
        return found
