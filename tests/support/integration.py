"""How long an integration is: lines of code between the marks BEGIN and END in an example."""

import ast
import io
import tokenize
from pathlib import Path

BEGIN, END = "# integration: begin", "# integration: end"
_NOTHING = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER, tokenize.ENCODING,
}  # fmt: skip


def integration_lines(example: Path) -> int:
    """Lines between the marks, without comments, docstrings, blank lines and imports."""
    text = example.read_text()
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NOTHING
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            assert isinstance(node, ast.stmt)
            code -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(code & _marked(text))


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _marked(text: str) -> set[int]:
    """Numbers of the lines between the marks; there may be several pairs of them."""
    found, inside = set(), False
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() in {BEGIN, END}:
            assert inside == (line.strip() == END), f"line {number}: {line.strip()} out of order"
            inside = not inside
        elif inside:
            found.add(number)
    assert found, f"nothing stands between {BEGIN!r} and {END!r}"
    assert not inside, f"there is no {END!r}"
    return found
