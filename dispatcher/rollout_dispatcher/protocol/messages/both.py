"""What is said with either role."""

from rollout_dispatcher.protocol.messages.base import Count, Message


class Error(Message):
    """The connection is over.

    code: the stable word for why.
    message: what was found, what it means and what to do about it.
    retriable: whether the same can succeed later, on another connection.
    """

    type_code = 19
    code: str
    message: str
    retriable: bool = False


class Ping(Message):
    """The client is alive. A DP rank also says how far its training loop is in its open steps.

    handed_out: micro-batches of these that it was given so far, in all passes; left out if 0.
    collectives: that it has begun in process groups of all DP ranks, as far as they are counted;
        left out if 0.
    """

    type_code = 20
    optional = ("handed_out", "collectives")
    handed_out: Count = 0
    collectives: Count = 0


class Pong(Message):
    """So is the dispatcher, and it has heard what was said before the Ping.

    waits_for: to a DP rank whose training loop waits for a step: in words, what that waits for.
        Left out otherwise.
    """

    type_code = 21
    optional = ("waits_for",)
    waits_for: str = ""


class Bye(Message):
    """A deliberate goodbye, so that a closed connection is not taken for a fault.

    The client says nothing after it but `Freed` and `Swept`, where it is asked to. The dispatcher
    answers with its own once everything that the client has said is safe.
    """

    type_code = 22


class Advice(Message):
    """What the client should know of itself, for its log; nothing follows.

    Said to DP rank 0 of the trainer, and to producers with the capability `advice`.

    text: what, and what to do.
    """

    type_code = 37
    text: str
