"""Checks the index's file before LMDB maps it: LMDB trusts its pages, and a flipped byte in one
may end the process.

LMDB's file (0.9) is pages. The first two are metas; the one with the larger transaction counts. It
names the roots of two trees: one of free pages (numbers by transaction), one of named trees. A page
has a header of 16 bytes (its number, flags, where its list of nodes ends and where its nodes
begin), then the nodes' offsets, and the nodes from its end downwards. Values too large for a node
have pages of their own.

    meta: magic, version, address, map size, tree of free pages, main tree, last page, transaction
    tree: padding, flags, depth, pages of branches, of leaves, of large values, entries, root

Invariant: what passes has every page that LMDB may reach within the file, at most once in all trees
and the list of free pages together, with nodes that tile their page in the order of their keys.
What values say has checksums of its own (`index`).
"""

import os
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from operator import le, lt
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple

from rollout_dispatcher.errors import JournalCorrupt
from rollout_dispatcher.journal.files.disk import disk_errors

_META = Struct("<16xIIQQ48s48sQQ")
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_TREE = Struct("<IHHQQQQQ")
_PAGE = Struct("<QHHHH")
_PAGES = Struct("<QHHI")
_NODE = Struct("<HHHH")
_NUMBER = Struct("<Q")
_BRANCH, _LEAF, _OVERFLOW, _METADATA = 1, 2, 4, 8
_BIG, _TREE_WITHIN = 1, 2
_NONE = 2**64 - 1
#: Of the tree of free pages: integer keys, and LMDB's note that the index has no folder.
_FREE_FLAGS = 0x4008
#: LMDB's own bound on a tree's depth.
_MAX_DEPTH = 32
_METAS = 2


class _Meta(NamedTuple):
    """page_bytes stands in the padding of the tree of free pages."""

    magic: int
    version: int
    address: int
    map_bytes: int
    free: bytes
    main: bytes
    last_page: int
    transaction: int

    @property
    def page_bytes(self) -> int:
        return _Tree.read(self.free).padding


class _Tree(NamedTuple):
    padding: int
    flags: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int
    root: int

    @classmethod
    def read(cls, data: bytes) -> "_Tree":
        return cls(*_TREE.unpack(data))


class _Node(NamedTuple):
    """value: of a leaf's entry. child: a branch's page, or the bytes of a leaf's value."""

    key: bytes
    flags: int
    value: bytes
    child: int


class _Broken(Exception):
    """What is wrong, and in which page."""

    def __init__(self, page: int, what: str) -> None:
        super().__init__(what)
        self.page = page


def check_index(path: Path, names: Collection[bytes]) -> None:
    """Raise JournalCorrupt unless LMDB can use this file; names: of the trees that it may have.

    A file without bytes is a new one.
    """
    with disk_errors("read", path):
        handle = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(handle).st_size
            if size:
                _Check(path, handle, size, names).run()
        finally:
            os.close(handle)


class _Check:
    """One look at one file."""

    def __init__(self, path: Path, handle: int, size: int, names: Collection[bytes]) -> None:
        self._path, self._handle, self._size = path, handle, size
        self._names = names
        self._page_bytes = 4096
        self._last = 0
        self._used = bytearray()

    def run(self) -> None:
        try:
            meta = self._find_meta()
            self._last = meta.last_page
            needed = (meta.last_page + 1) * self._page_bytes
            if self._size < needed:
                raise JournalCorrupt(
                    self._path, self._size, f"it ends there and should have {needed} bytes"
                )
            self._used = bytearray(meta.last_page + 1)
            self._used[:_METAS] = b"\1" * _METAS
            self._check_trees(meta)
        except _Broken as broken:
            raise JournalCorrupt(
                self._path, broken.page * self._page_bytes, f"{broken}, in the pages of LMDB"
            ) from None

    # -- metas ------------------------------------------------------------------------------

    def _find_meta(self) -> _Meta:
        first = self._meta(0)
        self._page_bytes = first.page_bytes
        if not 512 <= self._page_bytes <= 2**15 or self._page_bytes & (self._page_bytes - 1):
            raise _Broken(0, f"pages of {self._page_bytes} bytes")
        second = self._meta(1)
        if second.page_bytes != self._page_bytes:
            raise _Broken(1, f"pages of {second.page_bytes} bytes")
        return second if second.transaction > first.transaction else first

    def _meta(self, number: int) -> _Meta:
        data = self._read(number * self._page_bytes, 16 + _META.size)
        if len(data) < 16 + _META.size:
            raise _Broken(number, "the file is too short")
        page, _, flags, *_ = _PAGE.unpack_from(data)
        meta = _Meta(*_META.unpack_from(data))
        if (page, flags, meta.magic) != (number, _METADATA, _MAGIC):
            raise _Broken(number, "this is no meta page of LMDB")
        if meta.version != _VERSION:
            raise _Broken(number, f"its format is {meta.version}, not {_VERSION}")
        return meta

    # -- trees ------------------------------------------------------------------------------

    def _check_trees(self, meta: _Meta) -> None:
        main = _Tree.read(meta.main)
        for node in self._walk(main, flags=0):
            known = node.key in self._names and len(node.value) == _TREE.size
            if node.flags != _TREE_WITHIN or not known:
                raise _Broken(main.root, f"{node.key!r} is not the name of a tree")
            for _ in self._walk(_Tree.read(node.value), flags=0):
                pass
        free = _Tree.read(meta.free)
        for node in self._walk(free, flags=_FREE_FLAGS):
            if len(node.key) != _NUMBER.size or _number(node.key) > meta.transaction:
                raise _Broken(free.root, "a list of free pages is of no transaction")
            self._check_free(free.root, node.value)

    def _check_free(self, root: int, value: bytes) -> None:
        """A list of free pages: how many, then their numbers, largest first."""
        words = [number for (number,) in _NUMBER.iter_unpack(value[: len(value) // 8 * 8])]
        if not words or words[0] >= len(words):
            raise _Broken(root, "a list of free pages is cut off")
        pages = words[1 : words[0] + 1]
        if any(map(le, pages, pages[1:])):
            raise _Broken(root, "a list of free pages is out of order")
        for page in pages:
            self._use(root, page, 1)

    def _walk(self, tree: _Tree, flags: int) -> Iterator[_Node]:
        """The entries of a tree, whose pages are found to be sound on the way."""
        if tree.flags != flags or tree.depth > _MAX_DEPTH:
            raise _Broken(0, f"a tree of depth {tree.depth} with flags {tree.flags:#x}")
        counts = {_BRANCH: 0, _LEAF: 0, _OVERFLOW: 0}
        entries = 0
        if tree.root != _NONE:
            order = _number if flags == _FREE_FLAGS else _itself
            for node in self._nodes(tree.root, tree.depth, _Bounds(order), counts):
                entries += 1
                yield node
        found = (counts[_BRANCH], counts[_LEAF], counts[_OVERFLOW], entries)
        if found != (tree.branches, tree.leaves, tree.overflows, tree.entries):
            raise _Broken(0, "a tree's pages are not all there")

    def _nodes(
        self, page: int, depth: int, bounds: "_Bounds", counts: dict[int, int]
    ) -> Iterator[_Node]:
        """The entries of the tree of that depth that is rooted at this page."""
        kind = _LEAF if depth == 1 else _BRANCH
        data = self._page(page, page, kind)
        counts[kind] += 1
        nodes = self._parse(page, data, kind)
        if kind == _LEAF:
            bounds.split(page, [node.key for node in nodes])
            for node in nodes:
                yield self._whole(page, node, counts)
            return
        # The first key of a branch is never read: what is left of the second one begins with it.
        parts = bounds.split(page, [node.key for node in nodes[1:]])
        for node, part in zip(nodes, parts, strict=True):
            yield from self._nodes(node.child, depth - 1, part, counts)

    def _parse(self, page: int, data: bytes, kind: int) -> list[_Node]:
        """The nodes of a page, which tile it from its end."""
        *_, lower, upper = _PAGE.unpack_from(data)
        count = (lower - _PAGE.size) // 2
        least = 2 if kind == _BRANCH else 1
        if lower % 2 or count < least or not lower <= upper <= len(data):
            raise _Broken(page, f"a page of {count} nodes between {lower} and {upper}")
        offsets = Struct(f"<{count}H").unpack_from(data, _PAGE.size)
        ends, nodes = {}, []
        for offset in offsets:
            if offset % 2 or not upper <= offset <= len(data) - _NODE.size:
                raise _Broken(page, f"a node at {offset}")
            node, ends[offset] = _node(data, offset, kind)
            nodes.append(node)
        if _chain(ends, upper) != len(data) or len(ends) != count:
            raise _Broken(page, "nodes overlap or leave gaps")
        return nodes

    def _whole(self, page: int, node: _Node, counts: dict[int, int]) -> _Node:
        """A leaf's entry, with a value that has pages of its own read from them."""
        if not node.flags & _BIG:
            return node
        first, size = _number(node.value), node.child
        data = self._page(page, first, _OVERFLOW)
        *_, pages = _PAGES.unpack_from(data)
        if pages != (_PAGE.size + size + self._page_bytes - 1) // self._page_bytes:
            raise _Broken(first, f"{pages} pages for a value of {size} bytes")
        if pages > 1:
            self._use(first, first + 1, pages - 1)
        counts[_OVERFLOW] += pages
        return node._replace(value=self._read(first * self._page_bytes + _PAGE.size, size))

    # -- pages ------------------------------------------------------------------------------

    def _page(self, parent: int, page: int, kind: int) -> bytes:
        """A page that its parent says is of this kind."""
        self._use(parent, page, 1)
        data = self._read(page * self._page_bytes, self._page_bytes)
        number, padding, flags, *_ = _PAGE.unpack_from(data)
        if (number, flags) != (page, kind):
            raise _Broken(page, f"this is page {number} of kind {flags:#x}, not of {kind:#x}")
        if kind != _OVERFLOW and padding:
            raise _Broken(page, f"its padding is {padding}")
        return data

    def _use(self, parent: int, page: int, count: int) -> None:
        """Each page is in one place."""
        if not page >= _METAS or page + count > self._last + 1:
            raise _Broken(min(parent, self._last), f"page {page} of {self._last} is referred to")
        if any(self._used[page : page + count]):
            raise _Broken(page, "it is referred to twice")
        self._used[page : page + count] = b"\1" * count

    def _read(self, offset: int, nbytes: int) -> bytes:
        return os.pread(self._handle, nbytes, offset)


class _Bounds(NamedTuple):
    """What the keys of a part of a tree lie between: from `low` on and before `high`."""

    order: Callable[[bytes], Any]
    low: Any = None
    high: Any = None

    def split(self, page: int, keys: list[bytes]) -> Iterator["_Bounds"]:
        """The bounds between these keys, one more than there are keys.

        Raises _Broken for keys out of order or out of bounds.
        """
        found = [self.order(key) for key in keys]
        below = self.low is None or self.low <= found[0]
        above = self.high is None or found[-1] < self.high
        if not (below and above and all(map(lt, found, found[1:]))):
            raise _Broken(page, "keys are out of order")
        return (
            _Bounds(self.order, low, high) for low, high in pairwise([self.low, *found, self.high])
        )


def _node(data: bytes, offset: int, kind: int) -> tuple[_Node, int]:
    """The node there, and where it ends."""
    low, high, flags, key_bytes = _NODE.unpack_from(data, offset)
    start = offset + _NODE.size
    key = data[start : start + key_bytes]
    if kind == _BRANCH:
        return _Node(key, 0, b"", low | high << 16 | flags << 32), _even(start + key_bytes)
    size = low | high << 16
    end = start + key_bytes + (_NUMBER.size if flags & _BIG else size)
    return _Node(key, flags, data[start + key_bytes : end], size), _even(end)


def _chain(ends: dict[int, int], at: int) -> int:
    """Where it ends if each node begins where another one ends, from `at` on."""
    for _ in range(len(ends)):
        at = ends.get(at, -1)
    return at


def _even(offset: int) -> int:
    return offset + offset % 2


def _itself(key: bytes) -> bytes:
    return key


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")
