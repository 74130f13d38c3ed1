"""The rules of rewards, written a second time from docs/rewards.md, by other means than the product's."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Sequence
from fractions import Fraction

from rlexp.base.errors import RewardError
from rlexp.config.schema.rollouts import RuleName, RuleRewardConfig
from rlexp.verify.recording import TokenExample


def rule_score(cfg: RuleRewardConfig, key: str, text: str, prompt: TokenExample) -> float:
    """Return an answer's score by a rule, from 0 to 1."""
    match cfg.rule:
        case RuleName.count:
            wanted = _folded(cfg.text, cfg.ignore_case)
            return min(cfg.most, len(_folded(text, cfg.ignore_case).split(wanted)) - 1) / cfg.most
        case RuleName.length:
            return max(0, cfg.target - abs(cfg.target - len(text))) / cfg.target
        case RuleName.regex:
            rest = re.sub(cfg.pattern, "", text, flags=re.IGNORECASE if cfg.ignore_case else 0)
            return (len(text) - len(rest)) / max(1, len(text))
        case RuleName.exact:
            if prompt.right is None:
                raise RewardError(f"{prompt.origin}: {key}.rule=exact needs the field `answer`, and the row has none.")
            given, right = (_folded(each, cfg.ignore_case) for each in (text.strip(), prompt.right.strip()))
            return 1.0 if given == right else 0.0
        case RuleName.arithmetic:
            number = value_of_sum(prompt.text) if prompt.right is None else last_number(prompt.right)
            if number is None:
                raise RewardError(f"{prompt.origin}: {key}.rule=arithmetic finds no right number in this row.")
            return 1.0 if last_number(text) == number else 0.0


def _folded(text: str, ignore_case: bool) -> str:
    return text.casefold() if ignore_case else text


# ---- numbers in texts, read from left to right ----

LONGEST = 1000  # characters of a number, and of a row in which a sum is looked for
MINUS = "-−"
DIGITS = "0123456789"
OF_SUMS = "0123456789.,()+-−*×/÷"
MEANT = {"+": "+", "-": "-", "−": "-", "*": "*", "×": "*", "/": "/", "÷": "/"}


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text; None if there is none, or it is too long, or a fraction of zeroths."""
    at, last = 0, (0, 0, 0, 0)
    while at < len(text):
        bound = at > 0 and (_is_word(text[at - 1]) or text[at - 1] in ".)")  # a minus then subtracts
        first = at + 1 if text[at] in MINUS and not bound else at
        end = _number_end(text, first)
        if end is None:
            at += 1
            continue
        divided = _is(text, end, "/") and _is(text, end + 1, DIGITS)
        last = (at, first, end, _digits_end(text, end + 1) if divided else end)
        at = last[-1]
    begin, first, end, stop = last
    if not end or stop - begin > LONGEST:
        return None
    value = _number(text[first:end])
    if stop > end:
        divisor = int(text[end + 1 : stop])
        if not divisor:
            return None
        value /= divisor
    return -value if first > begin else value


def value_of_sum(text: str) -> Fraction | None:
    """Return the value of the last sum (or product, …) of a text; None if none can be computed whole."""
    at, last, crowded = 0, None, _crowded(text)
    while at < len(text):
        one = None if at in crowded else _sum_at(text, at)
        if one is not None:
            last = (at, *one)
        at = at + 1 if one is None else one[0]
    if last is None:
        return None
    begin, end, parts = last
    if _goes_on_before(text[:begin], parts[0]) or _goes_on_after(text[end:]):
        return None
    while parts[0] == "(" and parts.count("(") > parts.count(")"):  # it belongs to the sentence around
        parts = parts[1:]
    while parts[-1] == ")" and parts.count(")") > parts.count("("):
        parts = parts[:-1]
    with contextlib.suppress(SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return _worked_out(parts)
    return None


def _crowded(text: str) -> set[int]:
    """Return the places where so many characters of sums stand together that none is read."""
    places: set[int] = set()
    for of_sums, together in itertools.groupby(enumerate(text), lambda each: each[1].isspace() or each[1] in OF_SUMS):
        row = [place for place, _ in together]
        if of_sums and len(row) > LONGEST:
            places.update(row)
    return places


def _worked_out(parts: Sequence[str]) -> Fraction:
    """Work out a sum from its parts (numbers, signs and parentheses) as Python does, with fractions for numbers."""
    source = "".join(part if part in "+-*/()" else f"number({part!r})" for part in parts)
    value: Fraction = eval(source, {"number": _number})
    return value


def _sum_at(text: str, at: int) -> tuple[int, list[str]] | None:
    """Read a sum of at least two numbers from a place on; return where it ends, and its parts."""
    operand = _operand(text, at)
    if operand is None:
        return None
    end, parts = operand
    numbers = 1
    while _is(text, _spaces_end(text, end), "".join(MEANT)):
        sign = _spaces_end(text, end)
        operand = _operand(text, _spaces_end(text, sign + 1))
        if operand is None:
            break
        end, numbers = operand[0], numbers + 1
        parts += [MEANT[text[sign]], *operand[1]]
    return (end, parts) if numbers > 1 else None


def _operand(text: str, at: int) -> tuple[int, list[str]] | None:
    """Read a number with the parentheses around it, which may have a minus each."""
    parts: list[str] = []
    while _is(text, at, "(") or (_is(text, at, MINUS) and _is(text, at + 1, "(")):
        signed = text[at] in MINUS
        parts += ["-", "("] if signed else ["("]
        at = _spaces_end(text, at + 1 + signed)
    if _is(text, at, MINUS):
        parts.append("-")
        at += 1
    end = _number_end(text, at)
    if end is None:
        return None
    parts.append(text[at:end])
    while _is(text, _spaces_end(text, end), ")"):
        parts.append(")")
        end = _spaces_end(text, end) + 1
    return end, parts


def _goes_on_before(text: str, first: str) -> bool:
    """Say whether a sum is a part of more, by the text before it. A hyphen behind nothing is a bullet."""
    if text and (_is_word(text[-1]) or (text[-1] == ")" and first == "(")):
        return True
    rest = text.rstrip()
    before = rest[:-1].rstrip()
    subtracted = rest[-1:] in tuple(MINUS) and bool(before) and (_is_word(before[-1]) or before[-1] == ")")
    return subtracted or rest[-1:] in tuple("*/^%+×÷(")


def _goes_on_after(text: str) -> bool:
    if text and (_is_word(text[0]) or text[0] == "("):
        return True
    rest = text.lstrip()
    return rest[:1] in tuple("*/^%+×÷!") or (rest[:1] in tuple(MINUS) and rest[1:2] != ">")


def _number_end(text: str, at: int) -> int | None:
    """Return where an integer or decimal ends, with or without commas between thousands; None: it is no number."""
    if not _is(text, at, DIGITS):
        decimal = _is(text, at, ".") and not _is(text, at - 1, DIGITS) and _is(text, at + 1, DIGITS)
        return _digits_end(text, at + 1) if decimal else None
    end = place = _digits_end(text, at)
    if end - at <= 3:
        while _is(text, place, ",") and all(_is(text, place + each, DIGITS) for each in (1, 2, 3)):
            place += 4
        if place > end and _is(text, place, DIGITS):  # four digits behind a comma
            place -= 4
    decimal = _is(text, place, ".") and _is(text, place + 1, DIGITS)
    return _digits_end(text, place + 1) if decimal else place


def _number(written: str) -> Fraction:
    whole, _, decimals = written.replace(",", "").partition(".")
    return Fraction(int(whole + decimals), 10 ** len(decimals))


def _is(text: str, at: int, wanted: str) -> bool:
    return 0 <= at < len(text) and text[at] in wanted


def _is_word(mark: str) -> bool:
    return mark.isalnum() or mark == "_"


def _digits_end(text: str, at: int) -> int:
    while _is(text, at, DIGITS):
        at += 1
    return at


def _spaces_end(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
