"""Keys as paths below a root, and back: one folder an incarnation, one file an object.

    p.1/0           p.1/0
    ../../etc/x     %2E./..%2Fetc%2Fx
    one             one

What stands before the first slash of a key is the folder, all else the file's name, each quoted as
in a URL. So a path has at most two parts, none of which is hidden, `..`, empty, or longer than its
key asks for: no key leads out of the root, and no two lead to the same file.
"""

from urllib.parse import quote, unquote

#: Behind the name of a file that is being written; no quoted name has a `%` followed by this.
PART = "%part"
#: The name of nothing; no quoted name is this.
_EMPTY = "%"


def place(key: str) -> tuple[str | None, str]:
    """The folder of a key, None for the root itself, and the name of its file."""
    first, slash, rest = key.partition("/")
    return (_quoted(first), _quoted(rest)) if slash else (None, _quoted(first))


def key_of(folder: str | None, name: str) -> str | None:
    """The key of a file, whole or being written; None if it is no object's."""
    name = name.removesuffix(PART)
    key = _unquoted(name) if folder is None else f"{_unquoted(folder)}/{_unquoted(name)}"
    return key if place(key) == (folder, name) else None


def may_have(folder: str, prefix: str) -> bool:
    """Whether keys of a folder may begin so."""
    begin = _unquoted(folder) + "/"
    return begin.startswith(prefix) or prefix.startswith(begin)


def _quoted(part: str) -> str:
    found = quote(part, safe="", errors="surrogatepass") or _EMPTY
    return "%2E" + found[1:] if found.startswith(".") else found


def _unquoted(name: str) -> str:
    return "" if name == _EMPTY else unquote(name, errors="replace")
