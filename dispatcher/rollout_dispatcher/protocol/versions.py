"""Which version of the protocol two peers speak, and what both can do beyond it.

A client offers in its hello, the dispatcher answers with what was agreed in its welcome:

    client speaks   dispatcher speaks   agreed
    1 to 3          2 to 4              3: the newest that both speak
    1               2 to 4              VersionMismatch

A version says which messages there are and which keys each may have; a *capability* is a word for
something that a peer may lack, and is used only where both have it. New keys and messages come with
either, so within what was agreed an unknown key is a mistake, and is refused.
"""

from typing import NamedTuple

from rollout_dispatcher.errors import ProtocolError, VersionMismatch


class Offer(NamedTuple):
    """What one side can speak. versions: the first and the last."""

    versions: tuple[int, int]
    capabilities: frozenset[str] = frozenset()


class Terms(NamedTuple):
    """What was agreed."""

    version: int
    capabilities: frozenset[str] = frozenset()


#: The dispatcher says which fields samples have, once that is decided, and clients heed it.
SCHEMA = "schema"
#: DP ranks are told the loss tokens of each group of a step, and which group each sample is of.
GROUP_TOTALS = "group-totals"
#: And how many loss tokens as many samples as the step has are expected to have.
EXPECTED_LOSS = "expected-loss"
#: The dispatcher says where the trainer is, and which accepted samples it has dropped.
FEEDBACK = "feedback"
#: The dispatcher says to what multiple samples are to be padded, and DP ranks do it.
PADDING = "padding"
#: Fields may be ragged, or text: the keys `ragged` and `rows`, and the type `str`.
RAGGED = "ragged"
#: DP ranks say what their micro-batches took.
STEP_TIMES = "step-times"
#: And do so with the commit, where they know by then.
COMMIT_TIMES = "commit-times"
#: Payloads may lie in a payload store: `objects`, `places`, attempts, and the messages about them.
REFERENCES = "references"
#: The dispatcher says in a word why a sample is refused: a client can tell what to push again.
REASONS = "reasons"
#: Producers are told what is likely a mistake of theirs, and refused for nothing of it.
ADVICE = "advice"
#: What producers of this release have, and DP ranks, who say `GROUP_TOTALS` or `EXPECTED_LOSS` too
#: if their losses are averaged so: they make headers longer.
OF_PRODUCERS = frozenset({SCHEMA, FEEDBACK, RAGGED, REASONS, REFERENCES, ADVICE})
OF_RANKS = frozenset({PADDING, RAGGED, STEP_TIMES, COMMIT_TIMES, REFERENCES})
#: What this release speaks.
OURS = Offer((2, 2), OF_PRODUCERS | OF_RANKS | {GROUP_TOTALS, EXPECTED_LOSS})


def agree(client: Offer, dispatcher: Offer) -> Terms:
    """What these two speak with each other. Raises VersionMismatch if there is no version."""
    first = max(client.versions[0], dispatcher.versions[0])
    last = min(client.versions[1], dispatcher.versions[1])
    if first > last:
        raise VersionMismatch(client.versions, dispatcher.versions)
    return Terms(last, client.capabilities & dispatcher.capabilities)


def check(terms: Terms, offer: Offer) -> None:
    """Raise ProtocolError for terms that the client, who made this offer, cannot keep."""
    first, last = offer.versions
    if not first <= terms.version <= last:
        raise ProtocolError(
            f"the dispatcher chose protocol version {terms.version}, of {first} to {last}"
        )
    if unknown := sorted(terms.capabilities - offer.capabilities):
        raise ProtocolError(f"the dispatcher chose {', '.join(unknown)}, which was not offered")
