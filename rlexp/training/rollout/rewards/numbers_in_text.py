"""Read numbers and sums from texts, as exact fractions."""

from __future__ import annotations

import ast
import re
import sys
from fractions import Fraction

MOST_DIGITS = 1000  # longest number that is read; Python itself refuses much longer ones
MOST_OF_SUMS = 1000  # characters that may belong to a sum; in a longer row of them none is looked for

NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
# A minus belongs to the number unless it subtracts the number from something before it.
LAST = re.compile(rf"(?P<sign>(?<![\w.)])[-−])?(?P<number>{NUMBER})(?:/(?P<below>[0-9]+))?")
OPERAND = rf"(?:[-−]?\(\s*)*[-−]?(?:{NUMBER})(?:\s*\))*"
SUM = re.compile(rf"{OPERAND}(?:\s*[-−+*/×÷]\s*{OPERAND})+")
OF_SUMS = re.compile(r"[0-9.,()\-−+*/×÷\s]+")
# Text around a sum that makes it part of a larger expression. A hyphen at the start of a line is a bullet.
BEFORE = re.compile(r"(?:[*/^%+×÷(]\s*|\w|[\w)]\s*[-−]\s*)\Z")
AFTER = re.compile(r"\s*[*/^%+×÷!]|\w|\(|\s*[-−](?!>)")


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text: an integer, decimal or fraction, with or without commas between thousands."""
    match = _last(LAST, text)
    if match is None or len(match[0]) > MOST_DIGITS:
        return None
    value = Fraction(match["number"].replace(",", ""))
    if match["below"]:
        below = int(match["below"])
        if below == 0:
            return None
        value /= below
    return -value if match["sign"] else value


def value_of_prompt(text: str) -> Fraction | None:
    """Return the value of a text's last sum (or product, …); None if there is none or it cannot be computed."""
    rows = [each.span() for each in OF_SUMS.finditer(text) if len(each[0]) <= MOST_OF_SUMS]
    match = next((last for row in reversed(rows) if (last := _last(SUM, text, *row)) is not None), None)
    if match is None or BEFORE.search(text[: match.start()]) or AFTER.match(text[match.end() :]):
        return None
    if text[: match.start()].endswith(")") and match[0].startswith("("):  # a factor of a product
        return None
    source = _balanced(match[0]).replace(",", "")
    for sign, meant in (("×", "*"), ("÷", "/"), ("−", "-")):
        source = source.replace(sign, meant)
    source = " ".join(re.sub(r"(?<![0-9.])0+(?=[0-9])", "", source).split())
    try:
        return _value(ast.parse(source, mode="eval").body, source)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):  # ValueError: too many digits
        return None


def _last(pattern: re.Pattern[str], text: str, first: int = 0, end: int = sys.maxsize) -> re.Match[str] | None:
    return max(pattern.finditer(text, first, end), key=lambda match: match.start(), default=None)


def _value(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.BinOp(left, operator, right):
            one, other = _value(left, source), _value(right, source)
            match operator:
                case ast.Add():
                    return one + other
                case ast.Sub():
                    return one - other
                case ast.Mult():
                    return one * other
                case ast.Div():
                    return one / other
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, source)
        case ast.Constant(int() | float()):
            return Fraction(str(ast.get_source_segment(source, node)))  # as written: a float would round it
    raise SyntaxError(f"not arithmetic: {ast.dump(node)}")


def _balanced(text: str) -> str:
    """Remove parentheses at both ends that belong to the sentence around the sum."""
    while text.count("(") > text.count(")") and text.startswith("("):
        text = text[1:].lstrip()
    while text.count(")") > text.count("(") and text.endswith(")"):
        text = text[:-1].rstrip()
    return text
