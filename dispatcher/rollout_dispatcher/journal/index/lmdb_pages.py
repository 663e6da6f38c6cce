"""LMDB's file (0.9) as values: metas, trees, pages and their nodes.

The file is pages. The first two are metas; the one with the larger transaction counts. It names the
roots of two trees: one of free pages (numbers by transaction), one of named trees. A page has a
header of 16 bytes (its number, flags, where its list of nodes ends and where its nodes begin), then
the nodes' offsets, and the nodes from its end downwards. Values too large for a node have pages of
their own.

    meta: magic, version, address, map size, tree of free pages, main tree, last page, transaction
    tree: padding, flags, depth, pages of branches, of leaves, of large values, entries, root

Invariant: bytes in, values out; nothing here trusts an offset or a count before it is compared.
"""

from struct import Struct
from typing import NamedTuple

_META = Struct("<16xIIQQ48s48sQQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
TREE = Struct("<IHHQQQQQ")
PAGE = Struct("<QHHHH")
PAGES = Struct("<QHHI")
_NODE = Struct("<HHHH")
NUMBER = Struct("<Q")
BRANCH, LEAF, OVERFLOW, _METADATA = 1, 2, 4, 8
BIG, TREE_WITHIN = 1, 2
#: The root of an empty tree.
NO_PAGE = 2**64 - 1
#: Pages before those of the trees.
METAS = 2
#: Bytes at the beginning of a meta page that say all of it.
META_BYTES = PAGE.size + _META.size


class Broken(Exception):
    """What is wrong, and in which page."""

    def __init__(self, page: int, what: str) -> None:
        super().__init__(what)
        self.page = page


class Tree(NamedTuple):
    """Where a tree is, and what has to be found in it."""

    padding: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int

    @classmethod
    def read(cls, data: bytes) -> "Tree":
        """From its bytes in a meta, or in the tree of named trees."""
        return cls(*TREE.unpack(data))


class Meta(NamedTuple):
    """page_bytes stands in the padding of the tree of free pages."""

    magic: int
    version: int
    address: int
    map_bytes: int
    free: bytes
    main: bytes
    last_page: int
    transaction: int

    @classmethod
    def read(cls, number: int, data: bytes) -> "Meta":
        """From the first bytes of the meta page of that number. Raises Broken."""
        if len(data) < META_BYTES:
            raise Broken(number, "the file is too short")
        page, _, flags, *_ = PAGE.unpack_from(data)
        meta = cls(*_META.unpack_from(data))
        if (page, flags, meta.magic) != (number, _METADATA, _MAGIC):
            raise Broken(number, "this is no meta page of LMDB")
        if meta.version != _VERSION:
            raise Broken(number, f"its format is {meta.version}, not {_VERSION}")
        return meta

    @property
    def page_bytes(self) -> int:
        """Bytes of each page."""
        return Tree.read(self.free).padding


class Node(NamedTuple):
    """value: of a leaf's entry. child: a branch's page, or the bytes of a leaf's value."""

    key: bytes
    flags: int
    value: bytes
    child: int


def nodes_of(page: int, data: bytes, kind: int) -> list[Node]:
    """The nodes of a page, which tile it from its end. Raises Broken."""
    *_, lower, upper = PAGE.unpack_from(data)
    count = (lower - PAGE.size) // 2
    least = 2 if kind == BRANCH else 1
    if lower % 2 or count < least or not lower <= upper <= len(data):
        raise Broken(page, f"a page of {count} nodes between {lower} and {upper}")
    offsets = Struct(f"<{count}H").unpack_from(data, PAGE.size)
    ends, nodes = {}, []
    for offset in offsets:
        if offset % 2 or not upper <= offset <= len(data) - _NODE.size:
            raise Broken(page, f"a node at {offset}")
        node, ends[offset] = _node(data, offset, kind)
        nodes.append(node)
    if _chain(ends, upper) != len(data) or len(ends) != count:
        raise Broken(page, "nodes overlap or leave gaps")
    return nodes


def _node(data: bytes, offset: int, kind: int) -> tuple[Node, int]:
    """The node there, and where it ends."""
    low, high, flags, key_bytes = _NODE.unpack_from(data, offset)
    start = offset + _NODE.size
    key = data[start : start + key_bytes]
    if kind == BRANCH:
        return Node(key, 0, b"", low | high << 16 | flags << 32), _even(start + key_bytes)
    size = low | high << 16
    end = start + key_bytes + (NUMBER.size if flags & BIG else size)
    return Node(key, flags, data[start + key_bytes : end], size), _even(end)


def _chain(ends: dict[int, int], at: int) -> int:
    """Where it ends if each node begins where another one ends, from `at` on."""
    for _ in range(len(ends)):
        at = ends.get(at, -1)
    return at


def _even(offset: int) -> int:
    return offset + offset % 2
