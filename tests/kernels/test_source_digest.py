"""The digest that identifies the kernels' code follows the code, not its comments, and is the same on every Python."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

import pytest

from weft.kernels.common import source_digest as module
from weft.kernels.common.source_digest import code_words, source_digest

CODE = '''"""A module."""

from __future__ import annotations

BLOCK = 128
"""rows of a tile"""


@jit(do_not_specialize=["M"])
def kernel(x, M, BN: constexpr):
    """Adds."""
    # why it is so
    if BN > BLOCK:  # fmt: skip
        return x[M:, None] + BLOCK * 1.5
    return f"{x!r:>{M}} rows"
'''

MANY_NODES = """
async def f[T](a, /, b: int = 1, *c, d=None, **e) -> None:
    global g
    async with a as h, b:
        async for i in h:
            yield lambda *j: (k := j)
    try:
        del a.b[1:2, ...], c
    except* (ValueError, TypeError) as error:
        raise RuntimeError("x") from error
    else:
        assert not a or b and -c ** ~d @ e, "y"
    finally:
        pass
    match a:
        case [1, *rest] | {"k": None, **more} if rest:
            return {*a, b}, {**c, 1: b"z"}, [m async for m in a if m for n in m], "a" "b" f"{a}" f"c{b!s:{c}.2f}"
        case P(x=1.5e300, y=2j) as whole:
            nonlocal_ = a if b else c < d <= e is not f not in a
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("# why it is so", "# another reason"),
        ("    # why it is so\n", ""),
        ('    """Adds."""\n', ""),
        ('"""A module."""', '"""Another."""'),
        ('"""rows of a tile"""\n', ""),
        ("BLOCK * 1.5", "(\n            BLOCK\n            * 1.50\n        )"),
        ('["M"]', "['M',]"),
    ],
)
def test_comments_docstrings_and_formatting_change_nothing(before: str, after: str) -> None:
    assert before in CODE
    assert code_words(CODE.replace(before, after)) == code_words(CODE)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("BLOCK = 128", "BLOCK = 64"),
        ("BLOCK = 128", "BLOCK = 128.0"),
        ("BLOCK = 128", 'BLOCK = "128"'),
        ("BN > BLOCK", "BN >= BLOCK"),
        ('["M"]', '["M", "BN"]'),
        ('["M"]', "[]"),
        ("x[M:, None]", "x[:M, None]"),
        ("x[M:, None] +", "x[M:, None] -"),
        (" rows", " columns"),
        ("x!r", "x!s"),
        ("BN: constexpr", "BN"),
        ("x, M,", "x, M, N,"),
    ],
)
def test_changed_code_changes_the_digest(before: str, after: str) -> None:
    assert before in CODE
    assert code_words(CODE.replace(before, after)) != code_words(CODE)


@pytest.mark.parametrize(
    ("code", "digest"), [(MANY_NODES.replace("[T]", ""), "8bd6f127ac3fcdde"), (CODE, "d620ed997a7c7d65")]
)
def test_every_version_of_python_computes_the_same(code: str, digest: str) -> None:
    """The digests were made with 3.13. Type parameters, which 3.11 cannot read, are left out."""
    assert hashlib.sha256(code_words(code).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("source", ['f"{x:>{M}} rows"', 'f"{x:{M}}"', 'f"{x:{M}{N}.2f}"', 'f"{x:}"', 'f""'])
def test_split_and_empty_text_of_an_f_string_changes_nothing(source: str) -> None:
    """Python 3.12.0 and 3.12.1 append empty text to a nested format."""
    tree = ast.parse(source)
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]:
        values, node.values = node.values, [ast.Constant("")]
        for value in values:
            text = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
            node.values += [ast.Constant(text[:1]), ast.Constant(text[1:])] if text else [value]
        node.values.append(ast.Constant(""))
    words: list[str] = []
    module._add_words(tree, words)
    assert " ".join(words) == code_words(source)


def test_imports_change_nothing() -> None:
    assert code_words("from a.b import c\nimport d\n" + CODE) == code_words(CODE)


def test_a_digest_covers_only_the_listed_modules_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KERNELS", tmp_path)
    digest = source_digest.__wrapped__
    (tmp_path / "matmul").mkdir()
    (tmp_path / "matmul/gemm.py").write_text("a = 1  # first")
    (tmp_path / "matmul/table.json").write_text('{"a": 1, "b": 2}')
    (tmp_path / "matmul/other.py").write_text("c = 1")
    before = digest("matmul/gemm", "matmul/table.json")
    (tmp_path / "matmul/gemm.py").write_text('"""A docstring."""\nimport x\n\na = 1')
    (tmp_path / "matmul/table.json").write_text('{"b": 2,\n "a": 1}')
    (tmp_path / "matmul/other.py").write_text("c = 2")
    assert digest("matmul/gemm", "matmul/table.json") == before
    (tmp_path / "matmul/table.json").write_text('{"a": 1, "b": 3}')
    assert digest("matmul/gemm", "matmul/table.json") != before
    with pytest.raises(FileNotFoundError):
        digest("matmul/gone")
