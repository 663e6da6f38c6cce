"""torchtitan: a method to override in a subclass of `Batcher`, the RL trainer's.

The batcher fills rows of `seq_len` tokens in order and pads each. Fewer rows are less to compute;
with the most expensive first, rows assigned round robin are alike on all ranks.
"""

from rollout_planner import pack


def _assign_training_samples_to_rows(self, training_samples):
    lengths = [self.num_tokens_to_pack(sample) for sample in training_samples]
    return [[training_samples[i] for i in row] for row in pack(lengths, self.seq_len)]
