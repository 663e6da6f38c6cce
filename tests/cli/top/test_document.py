"""docs/top.md shows what is there: pictures of both sizes, with a slow rank in them."""

import pytest

from tests.cli.top.captures import DOCUMENT, SIZES
from tests.support.generated import between
from tests.support.slow_rank import SLOW


@pytest.mark.parametrize("name", SIZES)
def test_a_picture_is_whole(name: str) -> None:
    width, height = SIZES[name]
    text = DOCUMENT.read_text()
    start, stop = between(text, name)
    fence, *picture, end = text[start:stop].splitlines()
    assert (fence, end) == ("```text", "```")
    assert len(picture) <= height
    assert max(map(len, picture)) <= width
    assert "dispatcher top" in picture[0]
    assert f"rank {SLOW} takes 1.4" in "\n".join(picture), "run: python -m tests.cli.top.captures"
