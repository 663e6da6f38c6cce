"""Checks the index's file before LMDB maps it: LMDB trusts its pages, and a flipped byte in one
may end the process.

Invariant: what passes has every page that LMDB may reach within the file, at most once in all trees
and the list of free pages together, with nodes that tile their page in the order of their keys.
What values say has checksums of its own (`index`).
"""

import os
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from operator import le, lt
from pathlib import Path
from typing import Any, NamedTuple

from rollout_dispatcher.errors import JournalCorrupt
from rollout_dispatcher.journal.files.disk import disk_errors
from rollout_dispatcher.journal.index.lmdb_pages import (
    BIG,
    BRANCH,
    LEAF,
    META_BYTES,
    METAS,
    NO_PAGE,
    NUMBER,
    OVERFLOW,
    PAGE,
    PAGES,
    TREE,
    TREE_WITHIN,
    Broken,
    Meta,
    Node,
    Tree,
    nodes_of,
)

#: Of the tree of free pages: integer keys, and LMDB's note that the index has no folder.
_FREE_FLAGS = 0x4008
#: LMDB's own bound on a tree's depth.
_MAX_DEPTH = 32


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
            self._used[:METAS] = b"\1" * METAS
            self._check_trees(meta)
        except Broken as broken:
            raise JournalCorrupt(
                self._path, broken.page * self._page_bytes, f"{broken}, in the pages of LMDB"
            ) from None

    # -- metas ------------------------------------------------------------------------------

    def _find_meta(self) -> Meta:
        first = self._meta(0)
        self._page_bytes = first.page_bytes
        if not 512 <= self._page_bytes <= 2**15 or self._page_bytes & (self._page_bytes - 1):
            raise Broken(0, f"pages of {self._page_bytes} bytes")
        second = self._meta(1)
        if second.page_bytes != self._page_bytes:
            raise Broken(1, f"pages of {second.page_bytes} bytes")
        return second if second.transaction > first.transaction else first

    def _meta(self, number: int) -> Meta:
        return Meta.read(number, self._read(number * self._page_bytes, META_BYTES))

    # -- trees ------------------------------------------------------------------------------

    def _check_trees(self, meta: Meta) -> None:
        main = Tree.read(meta.main)
        for node in self._walk(main, flags=0):
            known = node.key in self._names and len(node.value) == TREE.size
            if node.flags != TREE_WITHIN or not known:
                raise Broken(main.root, f"{node.key!r} is not the name of a tree")
            for _ in self._walk(Tree.read(node.value), flags=0):
                pass
        free = Tree.read(meta.free)
        for node in self._walk(free, flags=_FREE_FLAGS):
            if len(node.key) != NUMBER.size or _number(node.key) > meta.transaction:
                raise Broken(free.root, "a list of free pages is of no transaction")
            self._check_free(free.root, node.value)

    def _check_free(self, root: int, value: bytes) -> None:
        """A list of free pages: how many, then their numbers, largest first."""
        words = [number for (number,) in NUMBER.iter_unpack(value[: len(value) // 8 * 8])]
        if not words or words[0] >= len(words):
            raise Broken(root, "a list of free pages is cut off")
        pages = words[1 : words[0] + 1]
        if any(map(le, pages, pages[1:])):
            raise Broken(root, "a list of free pages is out of order")
        for page in pages:
            self._use(root, page, 1)

    def _walk(self, tree: Tree, flags: int) -> Iterator[Node]:
        """The entries of a tree, whose pages are found to be sound on the way."""
        if tree.flags != flags or tree.depth > _MAX_DEPTH:
            raise Broken(0, f"a tree of depth {tree.depth} with flags {tree.flags:#x}")
        counts = {BRANCH: 0, LEAF: 0, OVERFLOW: 0}
        entries = 0
        if tree.root != NO_PAGE:
            order = _number if flags == _FREE_FLAGS else _itself
            for node in self._nodes(tree.root, tree.depth, _Bounds(order), counts):
                entries += 1
                yield node
        found = (counts[BRANCH], counts[LEAF], counts[OVERFLOW], entries)
        if found != (tree.branches, tree.leaves, tree.overflows, tree.entries):
            raise Broken(0, "a tree's pages are not all there")

    def _nodes(
        self, page: int, depth: int, bounds: "_Bounds", counts: dict[int, int]
    ) -> Iterator[Node]:
        """The entries of the tree of that depth that is rooted at this page."""
        kind = LEAF if depth == 1 else BRANCH
        data = self._page(page, page, kind)
        counts[kind] += 1
        nodes = nodes_of(page, data, kind)
        if kind == LEAF:
            bounds.split(page, [node.key for node in nodes])
            for node in nodes:
                yield self._whole(page, node, counts)
            return
        # The first key of a branch is never read: what is left of the second one begins with it.
        parts = bounds.split(page, [node.key for node in nodes[1:]])
        for node, part in zip(nodes, parts, strict=True):
            yield from self._nodes(node.child, depth - 1, part, counts)

    def _whole(self, page: int, node: Node, counts: dict[int, int]) -> Node:
        """A leaf's entry, with a value that has pages of its own read from them."""
        if not node.flags & BIG:
            return node
        first, size = _number(node.value), node.child
        data = self._page(page, first, OVERFLOW)
        *_, pages = PAGES.unpack_from(data)
        if pages != (PAGE.size + size + self._page_bytes - 1) // self._page_bytes:
            raise Broken(first, f"{pages} pages for a value of {size} bytes")
        if pages > 1:
            self._use(first, first + 1, pages - 1)
        counts[OVERFLOW] += pages
        return node._replace(value=self._read(first * self._page_bytes + PAGE.size, size))

    # -- pages ------------------------------------------------------------------------------

    def _page(self, parent: int, page: int, kind: int) -> bytes:
        """A page that its parent says is of this kind."""
        self._use(parent, page, 1)
        data = self._read(page * self._page_bytes, self._page_bytes)
        number, padding, flags, *_ = PAGE.unpack_from(data)
        if (number, flags) != (page, kind):
            raise Broken(page, f"this is page {number} of kind {flags:#x}, not of {kind:#x}")
        if kind != OVERFLOW and padding:
            raise Broken(page, f"its padding is {padding}")
        return data

    def _use(self, parent: int, page: int, count: int) -> None:
        """Each page is in one place."""
        if not page >= METAS or page + count > self._last + 1:
            raise Broken(min(parent, self._last), f"page {page} of {self._last} is referred to")
        if any(self._used[page : page + count]):
            raise Broken(page, "it is referred to twice")
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

        Raises Broken for keys out of order or out of bounds.
        """
        found = [self.order(key) for key in keys]
        below = self.low is None or self.low <= found[0]
        above = self.high is None or found[-1] < self.high
        if not (below and above and all(map(lt, found, found[1:]))):
            raise Broken(page, "keys are out of order")
        return (
            _Bounds(self.order, low, high) for low, high in pairwise([self.low, *found, self.high])
        )


def _itself(key: bytes) -> bytes:
    return key


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")
