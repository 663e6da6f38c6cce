"""TorchSpec: `AsyncTrainingController.try_dispatch_batch`.

TorchSpec assigns the oldest samples round robin, one micro-batch a rank; ranks pad to the longest
in buckets of 256 tokens. This plans all dispatches of an optimizer step together, so that samples
of like length are padded together.
"""

from rollout_planner import plan_step


def try_dispatch_batch(self):
    if self._inference_error is not None:
        raise RuntimeError(f"Inference engine failed: {self._inference_error}")
    self.dispatch_batch_size = size = self.args.global_batch_size  # what the loop waits for
    if not getattr(self, "planned", None):
        with self._pool_lock:
            if len(self.sample_pool) < size:
                return False
            step = [self.sample_pool.popleft() for _ in range(size)]
            self._pool_bytes -= sum(self._sample_bytes.pop(one.mooncake_key, 0) for one in step)
        lengths, each = [one.tensor_shapes["input_ids"][-1] for one in step], len(self.train_queues)
        ranks = plan_step(
            lengths, dp_size=each, micro_batch_size=self.args.per_dp_rank_batch_size,
            layout="padded", pad_to=256,
        )  # fmt: skip
        # They are dealt in turn.
        self.planned = [
            [step[i] for deal in zip(*parts, strict=True) for i in deal]
            for parts in zip(*ranks, strict=True)
        ]
    batch = self.planned.pop(0)
    self._dispatch_to_queues(batch, self.train_queues)
    self._training_monitor.record(len(batch))
    self.batch_id += 1
    return True
