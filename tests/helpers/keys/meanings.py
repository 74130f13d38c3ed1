"""What a key means: the comment behind its field in the schema, or else the comment lines directly above the field.

An option of an Enum has its meaning in the same place. A field that a subclass declares again keeps its meaning, unless
it has a comment there too.
"""

from __future__ import annotations

import ast
import functools
import io
import sys
import tokenize
from pathlib import Path

Comments = dict[str, dict[str, str]]  # of a module: of each class, by field


def meaning(owner: type, field: str) -> str | None:
    for each in owner.__mro__:
        file = getattr(sys.modules.get(each.__module__), "__file__", None)
        if file and "site-packages" not in file:
            own = comments_of(Path(file).read_text(encoding="utf-8")).get(each.__name__, {})
            if field in own:
                return own[field]
    return None


@functools.cache
def comments_of(source: str) -> Comments:
    tree = ast.parse(source)
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.lstrip("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        node.name: {
            name: said
            for statement in node.body
            if (name := _declared(statement)) and (said := _beside(statement, lines, comments))
        }
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def _declared(statement: ast.stmt) -> str | None:
    """Return the name that a field, or an Enum's member, declares."""
    match statement:
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
            return name
    return None


def _beside(statement: ast.stmt, lines: list[str], comments: dict[int, str]) -> str:
    if (last := statement.end_lineno or statement.lineno) in comments:
        return comments[last]
    first = statement.lineno
    while lines[first - 2].lstrip().startswith("#"):
        first -= 1
    return " ".join(comments[number] for number in range(first, statement.lineno))
