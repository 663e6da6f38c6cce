"""SkyRL: `MeshDispatch.stage_chunks`, which cuts mini-batches in order of arrival.

Chunks stay of equal size.
"""

from rollout_planner import balance_batch


def stage_chunks(cls, dp_size, data, mini_batch_boundaries):
    staged = []
    for start, end in mini_batch_boundaries:
        mini_batch = pad_training_input_batch(data[start:end], -(end - start) % dp_size)
        chunks, _ = balance_batch(mini_batch, dp_size, equal_size=True)
        batches = [TrainingInputBatch(chunk) for chunk in chunks]
        for batch in batches:
            batch.metadata = mini_batch.metadata
        staged.append([ray.put(batch) for batch in batches])
    return staged
