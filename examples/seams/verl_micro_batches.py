"""verl: `rearrange_micro_batches`, on each rank; where `index_select_tensor_dict` is.

Cuts as `verl_balance_batch.py` planned, if the budget is the same. Otherwise (another budget for
log-probs, mini-batches not planned apart, a worker that drops the column) it packs anew, with one
agreement on the count. With fewer samples than micro-batches all ranks raise, as with verl's own.
"""

from rollout_planner import pack
from rollout_workers import pack_local


def rearrange_micro_batches(
    batch, max_token_len, dp_group=None, num_batches_divided_by=None, same_micro_num_in_dp=True,
    min_num_micro_batch=None, use_dynamic_bsz_balance=True, force_group_size=1,
):  # fmt: skip
    ids, planned = batch["input_ids"], batch.get("planned", None)
    lengths = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(-1)
    options = {
        "groups": [i // force_group_size for i in range(len(lengths))],
        "multiple": num_batches_divided_by or 1,
        "minimum": min_num_micro_batch or 1,
        "order": "ends-small" if use_dynamic_bsz_balance else "peak-first",
        "fillers": False,
    }
    asked = force_group_size == options["multiple"] == options["minimum"] == 1
    if asked and planned is not None and planned[0, 1:].tolist() == [max_token_len, len(lengths)]:
        last = int(planned[:, 0].max())
        parts = [(planned[:, 0] == at).nonzero().flatten().tolist() for at in range(last + 1)]
    elif same_micro_num_in_dp and dp_group is not None:
        parts = pack_local(lengths, max_token_len, group=dp_group, **options)
    else:
        parts = pack(lengths, max_token_len, **options)
    return [index_select_tensor_dict(batch, part) for part in parts], parts
