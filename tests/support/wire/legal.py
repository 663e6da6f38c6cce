"""Who may say what in which state: the tables of `sessions.py`, written down again for tests."""

from rollout_dispatcher.protocol import messages as m
from rollout_dispatcher.protocol.sessions import SessionState, Side

S = SessionState
Kind = type[m.Message]

_FROM_PRODUCER: dict[Kind, SessionState] = dict.fromkeys(
    (m.Push, m.CloseGroup, m.EndPhase, m.EndStream, m.Freed, m.Swept, m.Ping), S.PRODUCER
)
_FROM_RANK: dict[Kind, SessionState] = dict.fromkeys(
    (
        m.Demand,
        m.PolicyVersion,
        m.Prepared,
        m.Unresolved,
        m.Commit,
        m.Finish,
        m.CheckpointSaved,
        m.StepTimes,
        m.Freed,
        m.Swept,
        m.Ping,
    ),
    S.RANK,
)
_TO_PRODUCER: tuple[Kind, ...] = (
    m.Pushed,
    m.Blocked,
    m.Resend,
    m.SchemaKnown,
    m.Feedback,
    m.Dropped,
    m.Advice,
    m.Free,
    m.Sweep,
    m.Pong,
)
_TO_RANK: tuple[Kind, ...] = (
    m.StepHeader,
    m.MicroBatch,
    m.StepWithdrawn,
    m.Release,
    m.LastStep,
    m.Advice,
    m.End,
    m.Free,
    m.Sweep,
    m.Pong,
)

#: What clients say, written down again: by state, what leads where.
FROM_CLIENTS: dict[SessionState, dict[Kind, SessionState]] = {
    S.AWAIT_HELLO: {m.HelloProducer: S.PRODUCER_GREETS, m.HelloRank: S.RANK_GREETS},
    S.PRODUCER_GREETS: {m.Bye: S.PRODUCER_LEAVES},
    S.PRODUCER: {**_FROM_PRODUCER, m.Bye: S.PRODUCER_LEAVES},
    S.PRODUCER_LEAVES: {m.Freed: S.PRODUCER_LEAVES, m.Swept: S.PRODUCER_LEAVES},
    S.RANK_GREETS: {m.Bye: S.RANK_LEAVES},
    S.RANK: {**_FROM_RANK, m.HelloRank: S.RANK_RESUMES, m.Bye: S.RANK_LEAVES},
    S.RANK_RESUMES: {m.Ping: S.RANK_RESUMES, m.Bye: S.RANK_LEAVES},
    S.RANK_LEAVES: {m.Freed: S.RANK_LEAVES, m.Swept: S.RANK_LEAVES},
}
_LEAVE_PRODUCER: dict[Kind, SessionState] = dict.fromkeys(
    (m.WelcomeProducer, *_TO_PRODUCER), S.PRODUCER_LEAVES
)
_LEAVE_RANK: dict[Kind, SessionState] = dict.fromkeys((m.WelcomeRank, *_TO_RANK), S.RANK_LEAVES)
#: What the dispatcher says.
TO_CLIENTS: dict[SessionState, dict[Kind, SessionState]] = {
    S.AWAIT_HELLO: {m.Error: S.CLOSED},
    S.PRODUCER_GREETS: {m.WelcomeProducer: S.PRODUCER, m.Error: S.CLOSED},
    S.PRODUCER: {**dict.fromkeys(_TO_PRODUCER, S.PRODUCER), m.Error: S.CLOSED},
    S.PRODUCER_LEAVES: {**_LEAVE_PRODUCER, m.Bye: S.CLOSED, m.Error: S.CLOSED},
    S.RANK_GREETS: {m.WelcomeRank: S.RANK, m.Error: S.CLOSED},
    S.RANK: {**dict.fromkeys(_TO_RANK, S.RANK), m.Error: S.CLOSED},
    S.RANK_RESUMES: {m.WelcomeRank: S.RANK, m.Pong: S.RANK_RESUMES, m.Error: S.CLOSED},
    S.RANK_LEAVES: {**_LEAVE_RANK, m.Bye: S.CLOSED, m.Error: S.CLOSED},
}


def may_say(side: Side, state: SessionState) -> dict[Kind, SessionState]:
    """What it may say in a state, and where that leads."""
    if side is Side.DISPATCHER:
        return TO_CLIENTS.get(state, {})
    hello: Kind = m.HelloProducer if side is Side.PRODUCER else m.HelloRank
    found = FROM_CLIENTS.get(state, {})
    return found if state is not S.AWAIT_HELLO else {hello: found[hello]}


def may_hear(side: Side, state: SessionState) -> dict[Kind, SessionState]:
    """What it may hear in a state: a rank that resumes also what was on its way to it."""
    if side is Side.DISPATCHER:
        return FROM_CLIENTS.get(state, {})
    on_its_way = dict.fromkeys(_TO_RANK, state) if state is S.RANK_RESUMES else {}
    return {**on_its_way, **TO_CLIENTS.get(state, {})}
