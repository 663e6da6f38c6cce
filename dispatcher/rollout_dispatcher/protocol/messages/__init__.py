"""The messages of the sample plane: `from rollout_dispatcher.protocol import messages as m`.

Whatever a module here defines is found here, so that a new message is added in one file.
"""

# ruff: noqa: F403
from rollout_dispatcher.protocol.messages.base import *
from rollout_dispatcher.protocol.messages.both import *
from rollout_dispatcher.protocol.messages.hellos import *
from rollout_dispatcher.protocol.messages.producers import *
from rollout_dispatcher.protocol.messages.ranks import *
from rollout_dispatcher.protocol.messages.samples import *
from rollout_dispatcher.protocol.messages.stores import *
