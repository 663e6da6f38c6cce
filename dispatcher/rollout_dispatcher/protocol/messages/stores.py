"""What the dispatcher asks of any client that has payload stores, as it opens none itself.

dispatcher               producer or DP rank
Free           ------>   (nobody needs these objects any more)
<------   Freed
Sweep          ------>   (what is there of an incarnation that has ended?)
<------   Swept
"""

from typing import Annotated

from pydantic import Field as Declared

from rollout_dispatcher.protocol.messages.base import Count, Message, Why
from rollout_dispatcher.protocol.messages.samples import Key, StoreAddress

#: Keys that are told at a time.
MAX_KEYS = 1024
Keys = Annotated[list[Key], Declared(max_length=MAX_KEYS)]


class Free(Message):
    """Nobody needs these objects any more: release them; what is not there counts as released.

    number: by which it is answered.
    store: the store's address.
    keys: of the objects, at most 1,024 at a time.
    """

    type_code = 30
    number: Count
    store: StoreAddress
    keys: Keys


class Freed(Message):
    """What became of a Free.

    number: of the Free.
    left: keys of objects that are still there, as their store could not release them.
    why: what it has said, for people.
    """

    type_code = 31
    number: Count
    left: Keys = Declared(default_factory=list)
    why: Why = ""


class Sweep(Message):
    """An incarnation of a producer has ended: which objects that it has put are there?

    number: by which it is answered.
    store: the store's address.
    prefix: that all its keys begin with.
    """

    type_code = 32
    number: Count
    store: StoreAddress
    prefix: Key


class Swept(Message):
    """What is there. The dispatcher says Free for those that it does not know.

    number: of the Sweep.
    keys: of the objects, at most 1,024 at a time.
    more: whether there are others; the dispatcher sweeps again once these are freed.
    why: what the store has said if it failed, for people.
    """

    type_code = 33
    number: Count
    keys: Keys = Declared(default_factory=list)
    more: bool = False
    why: Why = ""
