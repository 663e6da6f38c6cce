"""Why a run's stream has ended, as DP ranks are told: `MicroBatchStream.end_reason`."""

from enum import StrEnum


class EndReason(StrEnum):
    """Compares equal to its word.

    FINISHED: the DP ranks have finished the run, by `stream.finish()`.
    ENDED: producers, or a controller, have ended the stream, and all that was pushed is trained on.
    DRAINED: the dispatcher shuts down, and all that it held is trained on; producers may have more.
    """

    FINISHED = "finished"
    ENDED = "ended"
    DRAINED = "drained"
