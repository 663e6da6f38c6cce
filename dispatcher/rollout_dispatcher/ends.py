"""The reasons for which a run's stream ends: `MicroBatchStream.end_reason`."""

from enum import StrEnum


class EndReason(StrEnum):
    """A str enum.

    FINISHED: the DP ranks have finished the run, by `stream.finish()`.
    ENDED: producers or a controller have ended the stream; all pushed samples are trained on.
    DRAINED: the dispatcher shuts down; its samples are trained on, and producers may have more.
    """

    FINISHED = "finished"
    ENDED = "ended"
    DRAINED = "drained"
