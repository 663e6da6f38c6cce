"""Micro-batches as others have them: labels, arguments of Hugging Face models, TensorDicts."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollout_dispatcher.errors import ConfigError
from rollout_dispatcher.sample import CU_ROWS
from rollout_workers.micro_batch import layouts
from rollout_workers.micro_batch.layouts import IGNORED, Collation, Placement

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rollout_workers.micro_batch.micro_batch import MicroBatch


def need(batch: "MicroBatch", what: str, *names: str) -> None:
    """Raise ConfigError that begins with `what` where the stream was told to leave any out."""
    if missing := [name for name in names if name in batch.left_out - batch.keys()]:
        raise ConfigError(
            f"{what} {', '.join(names)}, and the stream's fields= leaves out "
            f"{', '.join(missing)}; name what is wanted there, such as labels"
        )


def labels(ids: Tensor, loss_mask: Tensor | None, placement: Placement) -> Tensor:
    """See `MicroBatch.labels`; laid out as the ids are, packed or padded."""
    rows = layouts.as_rows(ids, placement)
    if loss_mask is not None:
        counts = layouts.as_rows(loss_mask, placement) != 0
    else:
        counts = torch.zeros_like(rows, dtype=torch.bool)
        counts[layouts.index(placement.rows_of_tokens, rows)] = True
    counts[layouts.index(placement.starts, rows)] = False
    return rows.masked_fill(~counts, IGNORED).view_as(ids)


def hugging_face(batch: "MicroBatch") -> dict[str, Tensor | int]:
    """See `MicroBatch.as_hf`; of packed and padded ones."""
    need(batch, "as_hf() takes", "input_ids", "position_ids")
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


def tensordict(batch: "MicroBatch") -> "TensorDict":
    """See `MicroBatch.as_tensordict`."""
    try:
        from tensordict import TensorDict  # noqa: PLC0415  nothing else needs it
    except ModuleNotFoundError as error:
        raise ImportError(
            "as_tensordict() needs tensordict, which is not installed here; install it with "
            "pip install tensordict",
            name="tensordict",
        ) from error
    if batch.layout is Collation.PACKED:
        return TensorDict(dict(batch), batch_size=[])
    return TensorDict(by_sample(batch), batch_size=[batch.num_samples])


def by_sample(batch: "MicroBatch") -> dict[str, Tensor]:
    """Tensors of n rows, of a padded or jagged one; ragged ones are nested tensors."""
    rows = {name: tensor for name, tensor in batch.items() if name != "cu_seqlens"}
    for name in [name for name in rows if name + CU_ROWS in rows]:
        starts = rows.pop(name + CU_ROWS).long()
        rows[name] = torch.nested.nested_tensor_from_jagged(rows[name], starts)
    return rows
