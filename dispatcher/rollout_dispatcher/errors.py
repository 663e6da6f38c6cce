"""Every error this package raises on purpose, as one tree.

    DispatcherError
    +-- ConfigError          the operator's settings contradict each other
    +-- PlanError            a window cannot be planned as asked
    |   +-- SampleTooLong    a sample exceeds the micro-batch token budget
    |   +-- UnequalPartitions  numbers cannot be split as asked, or are none
    |   +-- GroupTooLong     so does a group that has to stay in one micro-batch
    +-- ProtocolError        the peer broke the wire protocol
    |   +-- FrameTooLarge    a frame is larger than the receiver's limit
    |   +-- FrameTooSlow     a frame came too slowly while others waited for its room
    |   +-- BodyTooLarge     a request body is larger than may be
    |   +-- UnknownEncoding  a request body is compressed
    |   +-- VersionMismatch  there is no protocol version that both sides speak
    +-- SampleRefused        one sample is not acceptable; the others are unharmed
    +-- RunFinished          the trainer has finished the run: nothing more is trained on
    |   +-- StreamEnded      the stream has ended; a SampleRefused too
    |   +-- ShuttingDown     the dispatcher stops, and a successor may accept it; SampleRefused too
    +-- BufferFull           a cap is reached; retry after the next step
    +-- PushTimeout          a push was not answered in the time that its caller gives it
    +-- ReceivingFull        too much is being received; retry later
    +-- ConnectionLimit      too many connections; retry later
    +-- Unauthorized         the token or certificate is missing or wrong
    |   +-- Forbidden        a producer's token is shown for more than to push
    +-- TlsFailed            no TLS session with the other side, and trying again will not help
    +-- ListenerFailed       an address accepts no more connections, and will not again
    +-- NotServing           a dispatcher is used before its start, after its end, or started twice
    +-- Stopping             the dispatcher stops and will go on from its journal; reconnect
    +-- RunChanged           another run answers than the one that took samples before
    +-- RankRefused          a DP rank may not join
    +-- GenerationFenced     a newer process group took over, or this one failed
    +-- PeerLost             another DP rank, or process of the same model replica, died or left
    +-- StepTimeout          no step, or end, came within the time that the training loop gives it
    +-- CheckpointRefused    a loaded checkpoint fits neither this run nor the other ranks'
    +-- JournalError         the journal cannot be opened or has failed
    |   +-- JournalFull      no room on its disk or in its index; it retries by itself
    |   +-- JournalCorrupt   what it wrote is not what can be read
    +-- DispatcherUnreachable  a client could not reach the dispatcher for too long
    +-- PeerFailed           another DP rank failed where all ranks compute something together
    +-- StepContractError    the training loop took or committed steps in an order it may not
    +-- ClientClosed         a stream or producer is used after its close
    +-- IllegalTransition    our own bug: a state machine was asked for a move it does not have

A message has the fact, its meaning and a remedy. `retriable`: the same call can succeed later.
`code` is the stable word on the wire and in metrics labels.
"""

from rollout_planner import errors as planning

DispatcherError = planning.DispatcherError
ConfigError = planning.ConfigError
PlanError = planning.PlanError
SampleTooLong = planning.SampleTooLong
UnequalPartitions = planning.UnequalPartitions
GroupTooLong = planning.GroupTooLong


class ProtocolError(DispatcherError):
    """The peer sent bytes that are not this protocol, or a message out of turn."""

    code = "protocol"


class FrameTooLarge(ProtocolError):
    """A frame announces more bytes than the receiver is willing to hold."""

    code = "frame-too-large"

    def __init__(self, part: str, size: int, limit: int) -> None:
        super().__init__(f"frame {part} of {size} bytes exceeds the limit of {limit} bytes")
        self.size, self.limit = size, limit


class FrameTooSlow(ProtocolError):
    """A frame took memory that others may wait for, and did not arrive in time."""

    code = "too-slow"
    retriable = True

    def __init__(self, filled: int, seconds: float) -> None:
        super().__init__(
            f"{filled} bytes of a frame have come, the last of them too slowly over {seconds:g} s; "
            "connect again and send it again (raise --set request-timeout where the network is as "
            "slow as that, or --set receive-bytes so that others need not wait for it meanwhile)"
        )


class BodyTooLarge(ProtocolError):
    """A request body is larger than may be."""

    code = "body-too-large"

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the body has more than {limit} bytes; push fewer samples a request, or raise "
            "--set max-body-bytes"
        )
        self.limit = limit


class UnknownEncoding(ProtocolError):
    """A request body is compressed."""

    code = "unknown-encoding"

    def __init__(self, named: str) -> None:
        super().__init__(f"a Content-Encoding of {named!r} cannot be undone; send none")


class VersionMismatch(ProtocolError):
    """The two sides speak different versions of the protocol."""

    code = "version"

    def __init__(self, client: int, dispatcher: int) -> None:
        older = "the dispatcher" if client > dispatcher else "the client"
        super().__init__(
            f"the client speaks protocol version {client}, the dispatcher version {dispatcher}; "
            f"install a newer release of rollout-dispatcher where {older} runs, or the same one on "
            "both sides"
        )
        self.client, self.dispatcher = client, dispatcher


class SampleRefused(DispatcherError):
    """One sample is not acceptable; `code` names the reason."""

    code = "refused"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RunFinished(DispatcherError):
    """The trainer has finished the run, or has left for good: nothing more is trained on."""

    code = "run-finished"


class StreamEnded(SampleRefused, RunFinished):
    """The stream has ended: by a controller, by all producers, or for this one by itself."""

    code = "stream-ended"

    def __init__(self, message: str) -> None:
        super().__init__("closed", message)


class ShuttingDown(SampleRefused, RunFinished):
    """The dispatcher shuts down and accepts no samples; its successor, or another one, may."""

    code = "shutting-down"
    retriable = True

    def __init__(self, message: str) -> None:
        super().__init__(self.code, message)


class BufferFull(DispatcherError):
    """A cap of the sample buffer is reached."""

    code = "full"
    retriable = True

    def __init__(self, cap: str, held: int, capacity: int, waits_for: str = "") -> None:
        super().__init__(
            f"the sample buffer is at its {cap} cap ({held} of {capacity}); "
            "retry after the next step is dispatched"
            + (f"; it waits for: {waits_for}" if waits_for else "")
        )
        self.cap, self.held, self.capacity = cap, held, capacity
        #: Of the samples of a push that timed out, to push them again under.
        self.sample_ids: tuple[str, ...] = ()


class PushTimeout(DispatcherError, TimeoutError):
    """A push was not answered within its `timeout`, and no cap is known that blocks it.

    sample_ids: of its samples, to push them again under.
    """

    code = "push-timeout"
    retriable = True

    def __init__(self, message: str, sample_ids: tuple[str, ...]) -> None:
        super().__init__(message)
        self.sample_ids = sample_ids


class ReceivingFull(DispatcherError):
    """Frames and request bodies that are being received use all memory that they may."""

    code = "receiving"
    retriable = True

    def __init__(self, nbytes: int, limit: int) -> None:
        super().__init__(
            f"{nbytes} bytes are being received already, of {limit} at a time over all "
            "connections; push again in a moment, or raise --set receive-bytes"
        )


class ConnectionLimit(DispatcherError):
    """More connections than the dispatcher may serve."""

    code = "connection-limit"
    retriable = True

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the dispatcher serves {limit} connections; raise --set max-connections (and the "
            "limit on open files, if its log says so)"
        )


class MadeRoom(DispatcherError):
    """A connection without a hello or a request was closed to make room for others."""

    code = "made-room"
    retriable = True

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} connections have not sent a hello, and the oldest make room for others; "
            "connect again"
        )


class Unauthorized(DispatcherError):
    """The peer did not show the token or certificate that is asked for."""

    code = "unauthorized"


class Forbidden(Unauthorized):
    """A producer's token was shown where that of trainers is needed.

    what: in words.
    """

    code = "forbidden"

    def __init__(self, what: str) -> None:
        super().__init__(
            "a producer's token may push, close groups and end what is its own, and may not "
            f"{what}; show the token of the dispatcher's --token-file"
        )


class TlsFailed(DispatcherError):
    """The two sides do not agree on TLS, or one does not trust the other's certificate."""

    code = "tls"


class ListenerFailed(DispatcherError):
    """An address accepts no more connections, and will not again."""

    code = "listener"

    def __init__(self, endpoint: object, reason: object) -> None:
        super().__init__(f"nobody can connect to {endpoint} any more ({reason}); start it again")


class StoreFailed(DispatcherError):
    """A payload store cannot do what it is asked; the same may succeed later."""

    code = "store"
    retriable = True

    def __init__(self, address: object, reason: object) -> None:
        super().__init__(f"the payload store {address} has failed: {reason}")


class NotServing(DispatcherError):
    """A dispatcher is used before its start or after its end, or is started a second time."""

    code = "not-serving"


class Stopping(DispatcherError):
    """The dispatcher stops, and goes on from its journal when it is started again."""

    code = "stopping"
    retriable = True


class RunChanged(DispatcherError):
    """Another run is served than the one that a producer pushed to, or expects.

    before, now: ids of both runs. accepted: samples of this producer that the former accepted.
    """

    code = "run-changed"

    def __init__(self, before: str, now: str, accepted: int | None = None) -> None:
        lost = "" if accepted is None else f", which accepted {accepted} samples of this producer"
        super().__init__(
            f"the dispatcher serves run {now} now, and no longer run {before}{lost}: it was "
            "restarted without a journal, or another one has its address. Samples of the former "
            "run that it had not trained are lost: push them again, or restore its journal "
            "(--journal-dir)"
        )
        self.before, self.now, self.accepted = before, now, accepted


class RankRefused(DispatcherError):
    """A DP rank may not join: out of range, claimed twice, or of the wrong size."""

    code = "rank-refused"


class GenerationFenced(DispatcherError):
    """The process group was superseded by a newer one, or failed as a whole."""

    code = "fenced"


class PeerLost(DispatcherError):
    """Another DP rank, or another process of this one's model replica, died or closed its stream,
    and training cannot go on without it.
    """

    code = "peer-lost"


class StepTimeout(DispatcherError, TimeoutError):
    """No step, or end, came within the `timeout` of the stream; it may be awaited again."""

    code = "step-timeout"
    retriable = True

    def __init__(self, seconds: float, waits_for: str, what: str = "step") -> None:
        super().__init__(f"no {what} within {seconds:g} s; it waits for: {waits_for}")
        self.seconds, self.waits_for = seconds, waits_for


class CheckpointRefused(DispatcherError):
    """A checkpoint that was loaded does not fit this run, or not what other DP ranks loaded."""

    code = "checkpoint"


class JournalError(DispatcherError):
    """The journal cannot be opened, or cannot make anything durable any more."""

    code = "journal"


class JournalFull(JournalError):
    """The journal's disk or index has no room; what is queued is kept and tried again."""

    code = "journal-full"
    retriable = True


class JournalCorrupt(JournalError):
    """Something that was durable cannot be read back; `path`, `offset` and `what` say where."""

    code = "journal-corrupt"

    def __init__(self, path: object, offset: int, what: str) -> None:
        super().__init__(
            f"journal file {path} is damaged at offset {offset}: {what}; nothing was changed: "
            "restore the journal directory from a copy, or move it away to start with none (the "
            "samples in it are lost then)"
        )
        self.path, self.offset, self.what = path, offset, what


class DispatcherUnreachable(DispatcherError):
    """A client could not reach the dispatcher within its time-out."""

    code = "unreachable"
    retriable = True

    def __init__(self, endpoint: object, seconds: float, last: BaseException) -> None:
        reason = str(last) or type(last).__name__
        super().__init__(
            f"no connection to the dispatcher at {endpoint} for {seconds:.0f} s (last: {reason}); "
            "check that it runs and is reachable, or raise reconnect_timeout"
        )


class PeerFailed(DispatcherError):
    """Another DP rank failed, or differs from this one, where all of them compute a total."""

    code = "peer-failed"


class StepContractError(DispatcherError):
    """The training loop took, read or committed steps in an order that it may not."""

    code = "step-contract"


class ClientClosed(DispatcherError):
    """A stream or producer is used after its close, or was closed while a call waited."""

    code = "closed"


class IllegalTransition(DispatcherError):
    """An illegal move of a state machine: a bug of the dispatcher or client."""

    code = "internal"

    def __init__(self, state: object, event: object) -> None:
        super().__init__(f"no transition from {state} on {event}")
