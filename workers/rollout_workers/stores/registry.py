"""Which class serves an address: by what the address begins with, before the colon.

A store of somebody else's is a class that does what `PayloadStore` says, named by its scheme in an
entry point of its distribution, which has to be installed where producers and DP ranks run:

    [project.entry-points."rollout_dispatcher.payload_stores"]
    s3 = "their_package.s3:S3Store"
"""

from importlib import import_module
from importlib.metadata import entry_points

from rollout_dispatcher.errors import StoreFailed
from rollout_workers.stores.interface import PayloadStore

#: Where others name theirs.
ENTRY_POINTS = "rollout_dispatcher.payload_stores"
#: Ours: the module and the class of each, loaded when an address asks for it, as engines are large.
BUILT_IN = {
    "file": ("rollout_workers.stores.file", "FileStore"),
    "mooncake": ("rollout_workers.stores.mooncake", "MooncakeStore"),
    "ray": ("rollout_workers.stores.ray", "RayStore"),
    "transferqueue": ("rollout_workers.stores.transfer_queue.store", "TransferQueueStore"),
}


def open_store(address: str) -> PayloadStore:
    """The store at an address, `file:///data/rollouts` say.

    Raises StoreFailed where it cannot be used from here, in words that say what to do.
    """
    return store_class(address).open(address)


def store_class(address: str) -> type[PayloadStore]:
    """Who serves an address; raises StoreFailed."""
    scheme, colon, _ = address.partition(":")
    if not colon:
        raise StoreFailed(address, "an address begins with a scheme, as file:///data/rollouts does")
    try:
        found = _load(scheme)
    except ImportError as error:
        raise StoreFailed(
            address,
            f"what the scheme {scheme} needs cannot be loaded ({error}); install it where "
            "producers and DP ranks run",
        ) from error
    if found is None:
        raise StoreFailed(
            address, f"nobody here serves the scheme {scheme}; known are {', '.join(schemes())}"
        )
    if not (isinstance(found, type) and issubclass(found, PayloadStore)):
        raise StoreFailed(address, f"{found!r}, which serves its scheme, is no PayloadStore")
    return found


def schemes() -> list[str]:
    """Every scheme that is known here."""
    return sorted({*BUILT_IN, *(item.name for item in entry_points(group=ENTRY_POINTS))})


def _load(scheme: str) -> object | None:
    if scheme in BUILT_IN:
        module, name = BUILT_IN[scheme]
        return getattr(import_module(module), name)  # type: ignore[no-any-return]
    for item in entry_points(group=ENTRY_POINTS, name=scheme):
        return item.load()  # type: ignore[no-any-return]
    return None
