"""What an Error frame of the dispatcher becomes for the user of a client."""

from rollout_dispatcher import errors
from rollout_dispatcher.protocol import messages as m

#: What a refusal becomes in the user's thread; every code not named here is a ProtocolError.
_REFUSALS: dict[str, type[errors.DispatcherError]] = {
    errors.ConfigError.code: errors.ConfigError,
    errors.PlanError.code: errors.PlanError,
    errors.SampleTooLong.code: errors.PlanError,
    errors.GroupTooLong.code: errors.PlanError,
    errors.Unauthorized.code: errors.Unauthorized,
    errors.Forbidden.code: errors.Unauthorized,
    errors.TlsFailed.code: errors.TlsFailed,
    errors.RankRefused.code: errors.RankRefused,
    errors.GenerationFenced.code: errors.GenerationFenced,
    errors.PeerLost.code: errors.PeerLost,
    errors.RunFinished.code: errors.RunFinished,
    errors.StepContractError.code: errors.StepContractError,
    errors.CheckpointRefused.code: errors.CheckpointRefused,
}


def refusal(message: m.Error) -> Exception:
    """The exception for an Error frame: a ConnectionError when trying again may help."""
    if message.retriable:
        return ConnectionError(f"the dispatcher closed the connection: {message.message}")
    return _REFUSALS.get(message.code, errors.ProtocolError)(message.message)
