"""Numbers and sums read out of texts, as exact fractions."""

from __future__ import annotations

import ast
import re
from fractions import Fraction

MOST_DIGITS = 1000  # of a number that is read: Python itself refuses to read much longer ones

NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+"
# A minus belongs to the number unless something stands before it that is subtracted from.
LAST = re.compile(rf"(?P<sign>(?<![\w.)])[-−])?(?P<number>{NUMBER})(?:/(?P<below>[0-9]+))?")
OPERAND = rf"(?:[-−]?\(\s*)*[-−]?(?:{NUMBER})(?:\s*\))*"
SUM = re.compile(rf"{OPERAND}(?:\s*[-−+*/×÷]\s*{OPERAND})+")
# What makes a sum part of a larger one that is not understood. A hyphen at the start of a line is a bullet.
BEFORE = re.compile(r"(?:[*/^%+×÷(]\s*|\w|[\w)]\s*[-−]\s*)$")
AFTER = re.compile(r"\s*[*/^%+×÷!]|\w|\(|\s*[-−](?!>)")


def last_number(text: str) -> Fraction | None:
    """The last number of a text: an integer, decimal or fraction, with or without commas between thousands."""
    found = _last(LAST, text)
    if found is None or len(found[0]) > MOST_DIGITS:
        return None
    value = Fraction(found["number"].replace(",", ""))
    if found["below"]:
        below = int(found["below"])
        if below == 0:
            return None
        value /= below
    return -value if found["sign"] else value


def value_of_prompt(text: str) -> Fraction | None:
    """What the last sum (or product, …) of a text comes to; None without one, and for one that cannot be worked out."""
    found = _last(SUM, text)
    if found is None or BEFORE.search(text[: found.start()]) or AFTER.match(text[found.end() :]):
        return None
    source = _balanced(found[0]).replace(",", "")
    for sign, meant in (("×", "*"), ("÷", "/"), ("−", "-")):
        source = source.replace(sign, meant)
    source = " ".join(re.sub(r"(?<![0-9.])0+(?=[0-9])", "", source).split())
    try:
        return _value(ast.parse(source, mode="eval").body, source)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return max(pattern.finditer(text), key=lambda found: found.start(), default=None)


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
    """Without the parentheses at its ends that belong to the sentence around it."""
    while text.count("(") > text.count(")") and text.startswith("("):
        text = text[1:].lstrip()
    while text.count(")") > text.count("(") and text.endswith(")"):
        text = text[:-1].rstrip()
    return text
