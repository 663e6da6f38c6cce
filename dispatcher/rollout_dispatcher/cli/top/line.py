"""Lines of a frame: text in spans, each with what it means, which may be shown as a colour."""

from dataclasses import dataclass
from enum import Enum


class Style(Enum):
    """What a span means. Nothing is told by it alone, as a terminal may have no colours."""

    PLAIN = ""
    DIM = "dim"
    STRONG = "bold"
    GOOD = "green"
    BAD = "bold red"
    WARN = "yellow"
    TITLE = "reverse"


@dataclass(frozen=True, slots=True)
class Line:
    """Spans of text, left to right."""

    spans: tuple[tuple[str, Style], ...] = ()

    @classmethod
    def of(cls, *spans: str | tuple[str, Style]) -> "Line":
        """A line; what has no style is plain."""
        return cls(tuple((s, Style.PLAIN) if isinstance(s, str) else s for s in spans))

    @property
    def text(self) -> str:
        """Without styles."""
        return "".join(text for text, _ in self.spans)

    def fit(self, width: int) -> "Line":
        """Exactly so wide: cut, or filled up with spaces in the style of its end."""
        spans, left = [], width
        for text, style in self.spans:
            spans.append((text[:left], style))
            left -= len(spans[-1][0])
        is_title = bool(spans) and spans[-1][1] is Style.TITLE
        return Line((*spans, (" " * left, Style.TITLE if is_title else Style.PLAIN)))

    def __add__(self, other: "Line") -> "Line":
        return Line(self.spans + other.spans)
