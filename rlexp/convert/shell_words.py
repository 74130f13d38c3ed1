"""The words of a shell script as bash makes them, from where a reader is; nothing is run.

What only bash could know (`$1`, `$(date)`, a variable of the environment) stays as it is written, and its word is
marked `Unknown`.
"""

from __future__ import annotations

import ast
import fnmatch
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
OF_A_WORD = 64  # characters that a word counts for beside its own
MOST_PUT_IN = 1 << 24  # characters in place of variables, in a whole script: A=$A$A doubles them
# Those of bash, which rounds a quotient towards 0.
OPERATIONS: Mapping[type[ast.AST], Callable[[int, int], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Mod: math.fmod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
REDIRECTION = re.compile(r"\d*(?:&>>?|>>?&?|<(?!<))|\d*<<-?|<<<")
OPERATORS = ("&&", "||", "|&", ";;&", ";;", ";&", "|", "&", ";", "\n", "(", ")")
PLAIN = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])")
BRACED = re.compile(r"([A-Za-z_]\w*|[0-9]+|[@*#])(\[[^\]]*\])?")


class TooMuch(ValueError):
    """A script whose variables make too much text."""


class Unknown(str):
    """A word with a part that only bash could know, as `$LR`: its text is the word as it is written. `why` names the
    line whose outcome decides it, where that is not known."""

    part: str
    why: str

    @staticmethod
    def of(text: str, part: str, why: str = "") -> Unknown:
        word = Unknown(text)
        word.part, word.why = part, why
        return word


@dataclass
class Word:
    text: str = ""
    begun: bool = False  # a word may be empty: ''
    quoted: bool = False
    unknown: Unknown | None = None  # its first part of this kind
    array: list[str] | None = None  # the elements, in NAME=( … )
    end: int = 0  # where it ends in the script

    def made(self) -> str:
        return self.text if self.unknown is None else Unknown.of(self.text, self.unknown.part, self.unknown.why)

    def add(self, text: str) -> None:
        self.text += text
        if isinstance(text, Unknown):
            self.unknown = self.unknown or text


@dataclass(frozen=True)
class Operator:
    text: str


class Room:
    """The room that is left for texts in place of variables."""

    def __init__(self) -> None:
        self.left = MOST_PUT_IN

    def take(self, texts: Sequence[str]) -> Sequence[str]:
        self.left -= sum(map(len, texts)) + OF_A_WORD * len(texts)
        if self.left < 0:
            raise TooMuch(f"its variables make more than {MOST_PUT_IN:,} characters")
        return texts


class Words:
    """The words of a text from `at`, with the variables that are `known`: a variable has one element, an array any
    number. `args` are the script's own arguments; None: they are not known."""

    def __init__(self, text: str, known: dict[str, list[str]], room: Room, args: list[str] | None = None) -> None:
        self.text, self.at, self.known, self.room, self.args = text, 0, known, room, args
        self.used: set[str] = set()
        self.splits = True  # whether spaces in a variable end a word, outside quotes

    def tokens(self) -> Iterator[Word | Operator]:
        """Yield words and what ends a command. Redirections are left out with the file that they name."""
        word = Word()
        while self.at < len(self.text):
            char = self.text[self.at]
            redirection = None if char.isdigit() and word.begun else REDIRECTION.match(self.text, self.at)
            if char == "(" and word.text.endswith("=") and ASSIGNMENT.fullmatch(word.text):
                word.array = self._array()
            elif word.begun and (char in " \t\r" or self._operator() or redirection):
                word.end = self.at
                yield word
                word = Word()
                continue
            if word.array is not None:
                word.end = self.at
                yield word
                word = Word()
            elif char in " \t\r":
                self.at, word = self.at + 1, Word()
            elif char == "#" and not word.begun:
                self.at = _end(self.text, "\n", self.at)
            elif self.text.startswith(("\\\n", "\\\r\n"), self.at):
                self.at = self.text.index("\n", self.at) + 1
            elif char == "\\" and not self.text[self.at + 1 :].strip(" \t\r"):  # it continues nothing at the end
                self.at = len(self.text)
            elif redirection:
                self.at = redirection.end()
                yield from self._redirected(redirection[0])
            elif operator := self._operator():
                self.at, word = self.at + len(operator), Word()
                yield Operator(operator)
            else:
                made = self._part(word)
                yield from made[:-1]
                word = made[-1]
        if word.begun:
            word.end = self.at
            yield word
        yield Operator("\n")

    def made(self) -> list[str]:
        """Return all words of the text; operators are words too, but for the ends of lines."""
        every = [token.made() if isinstance(token, Word) else token.text for token in self.tokens()]
        return [each for each in every if each != "\n"]

    def _operator(self) -> str | None:
        return next((each for each in OPERATORS if self.text.startswith(each, self.at)), None)

    def _redirected(self, operator: str) -> Iterator[Operator]:
        """Skip the word behind a redirection; a here-document's is its delimiter, with a quote if nothing is put in."""
        found = re.compile(r"[ \t]*(?:(['\"])([^'\"\n]*)\1|(\\?)([^\s;|&]*))").match(self.text, self.at)
        if found is not None:
            self.at = found.end()
            if operator.lstrip("0123456789") in ("<<", "<<-"):
                quote = "'" * bool(found[1] or found[3])
                yield Operator(f"<<{quote}{found[2] or found[4] or ''}")

    def document(self, delimiter: str) -> str:
        """Return a here-document and go on behind it."""
        quoted, delimiter = delimiter.startswith("'"), delimiter.removeprefix("'")
        found = re.compile(rf"^[ \t]*{re.escape(delimiter)}[ \t]*$", re.M).search(self.text, self.at)
        body = self.text[self.at : found.start() if found else len(self.text)]
        self.at = found.end() if found else len(self.text)
        return body if quoted else self._filled(re.sub(r"\\\n", " ", body))

    def _filled(self, text: str) -> str:
        """Return a text with the values of its variables."""
        word, inner = Word(), self._inner(text)
        while inner.at < len(inner.text):
            if inner.text[inner.at] == "$":
                inner._dollar(word, quoted=True)
            else:
                word.text += inner.text[inner.at]
                inner.at += 1
        return word.made()

    def _inner(self, text: str) -> Words:
        inner = Words(text, self.known, self.room, self.args)
        inner.used = self.used
        return inner

    def _array(self) -> list[str]:
        """Read the elements of `NAME=( … )`, whose `NAME=` has just been read."""
        inner = self._inner(self.text)
        inner.at, elements = self.at + 1, []
        for token in inner.tokens():
            if isinstance(token, Word):
                elements.append(token.made())
            elif token.text == ")":
                break
        self.at = inner.at
        return elements

    # ---- the parts of a word ----

    def _part(self, word: Word) -> list[Word]:
        """Read one part of a word: a quoted text, a variable or one character. A variable may make several words."""
        char, word.begun = self.text[self.at], True
        word.quoted = word.quoted or char in "'\"\\"
        if char == "\\":
            word.text += self.text[self.at + 1 : self.at + 2]
            self.at += 2
        elif char == "'":
            end = _end(self.text, "'", self.at + 1)
            word.text += self.text[self.at + 1 : end]
            self.at = end + 1
        elif char == '"':
            return self._double_quoted(word)
        elif char == "$":
            return self._dollar(word, quoted=False)
        elif char == "~" and not word.text and re.match(r"~(/|\s|$)", self.text[self.at : self.at + 2]):
            word.text += str(Path.home())
            self.at += 1
        elif char == "`":
            end = _end(self.text, "`", self.at + 1)
            word.add(self._computed(self.text[self.at : end + 1]))
            self.at = end + 1
        else:
            word.text += char
            self.at += 1
        return [word]

    def _double_quoted(self, word: Word) -> list[Word]:
        made, self.at = [word], self.at + 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            char = self.text[self.at]
            if char == "$":
                made = [*made[:-1], *self._dollar(made[-1], quoted=True)]
            elif char == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('"\\$`\n'):
                made[-1].text += self.text[self.at + 1].replace("\n", "")
                self.at += 2
            else:
                made[-1].text += char
                self.at += 1
        self.at += 1
        return made

    def _dollar(self, word: Word, *, quoted: bool) -> list[Word]:
        """Put in the value of a variable; what is not known stays as it is written."""
        text, at = self.text, self.at
        quoted = quoted or not self.splits or ASSIGNMENT.match(word.text) is not None
        if text.startswith("$(", at):
            self.at = _closing(text, at + 1, "(", ")")
            word.add(self._computed(text[at : self.at]))
            return [word]
        if text.startswith("${", at):
            self.at = _closing(text, at + 1, "{", "}")
            return self._braced(word, text[at : self.at], quoted=quoted)
        if (found := PLAIN.match(text, at)) is None:
            word.text, self.at = f"{word.text}$", at + 1
            return [word]
        self.at = found.end()
        return self._put(word, found[1], found[0], quoted, whole=found[1] in "@*")

    def _put(self, word: Word, name: str, said: str, quoted: bool, *, whole: bool = False) -> list[Word]:
        value = self.value(name)
        if value is None:
            word.add(Unknown.of(said, said))
            return [word]
        return _spread(word, value, quoted, whole=whole)

    def value(self, name: str) -> Sequence[str] | None:
        """Return the elements of a variable, to be put in; None if it is not known."""
        self.used.add(name)
        if name in self.known:
            return self.room.take(self.known[name])
        if self.args is None or not re.fullmatch(r"[1-9]\d*|[@*#]", name):
            return None
        if name.isdigit():
            return self.room.take(self.args[int(name) - 1 : int(name)] or [""])
        return [str(len(self.args))] if name == "#" else self.room.take(self.args)

    def _braced(self, word: Word, said: str, *, quoted: bool) -> list[Word]:
        """Put in `${NAME}`, `${NAME:-default}`, `${NAME%.sh}` and their like."""
        counts = re.fullmatch(r"\$\{#(\w+)(\[[@*]\])?\}", said)
        if counts is not None and (value := self.value(counts[1])) is not None:
            word.add(str(len(value) if counts[2] else len("".join(value[:1]))))
            return [word]
        inner = said[2:-1]
        found = BRACED.match(inner)
        if found is None or counts is not None or not said.endswith("}"):
            word.add(Unknown.of(said, said))
            return [word]
        name, rest = found[1], inner[found.end() :]
        whole = name in "@*" or found[2] in ("[@]", "[*]")
        value = self.value(name)
        if value is None and whole and found[2]:  # no variable of the environment is an array
            value = []
        if (other := re.match(r":?([-=+?])", rest)) is not None:
            there = value is not None and (other[0][0] != ":" or value not in ([""], []))
            if other[1] == "+" or not there:
                if other[1] == "?" or (value is None and other[1] == "+"):
                    word.add(Unknown.of(said, said))
                elif there or other[1] != "+":
                    return self._default(word, rest[other.end() :], quoted)
                word.begun = quoted or bool(word.text)
                return [word]
            return _spread(word, value or [], quoted, whole=whole)
        if value is not None and not rest and found[2] in (None, "[0]", "[@]", "[*]"):
            return _spread(word, value, quoted, whole=whole)
        shaped = None if value is None or found[2] or len(value) != 1 else self._shaped(value[0], rest)
        return _spread(word, [Unknown.of(said, said) if shaped is None else shaped], quoted, whole=False)

    def _default(self, word: Word, text: str, quoted: bool) -> list[Word]:
        if quoted:
            word.add(self._filled(text.replace('"', "")))
            return [word]
        every = [token.made() for token in self._inner(text).tokens() if isinstance(token, Word)]
        return _spread(word, every, True, whole=True)

    def _shaped(self, value: str, rest: str) -> str | None:
        """Return a value without its start (#, ##) or its end (%, %%), or with another part (/, //)."""
        if isinstance(value, Unknown):
            return Unknown.of(value, value.part, value.why)
        if rest in ("^^", ",,"):
            return value.upper() if rest == "^^" else value.lower()
        found = re.fullmatch(r"(##?|%%?|//?)(.*)", rest, re.S)
        if found is None:
            return None
        replaces = found[1][0] == "/"
        parts = [" ".join(self._inner(each).made()) for each in (found[2].split("/", 1) if replaces else [found[2]])]
        if any("$" in each or "`" in each for each in parts):
            return None
        if replaces:
            pattern = fnmatch.translate(parts[0]).removesuffix(r"\z").removesuffix(r"\Z")
            return re.sub(pattern, lambda _: "".join(parts[1:]), value, count=len(found[1]) % 2)
        ends = range(len(value) + 1) if found[1] in ("#", "%%") else range(len(value), -1, -1)
        for end in ends:
            cut, kept = (value[:end], value[end:]) if found[1][0] == "#" else (value[end:], value[:end])
            if fnmatch.fnmatchcase(cut, parts[0]):
                return kept
        return value

    def _computed(self, text: str) -> str:
        """Return what `$((8 * 2))`, `$(expr 16 / $n)` or `$(basename "$M")` is; others only bash knows."""
        if (said := self._of_command(re.sub(r"^\$\(|^`|[)`]$", "", text))) is not None:
            return said
        inner = re.fullmatch(r"\$\(\((.*)\)\)|(?:\$\(|`)\s*expr\s(.*?)[)`]", text, re.S)
        result = self.result((inner[1] or inner[2] or "") if inner else "")
        return Unknown.of(text, text) if result is None else str(result)

    def result(self, terms: str) -> int | None:
        """Return what bash makes of sums, products, quotients and comparisons of whole numbers; None: not known."""
        filled = self._filled(terms)
        put_in = re.sub(r"[A-Za-z_]\w*", lambda each: " ".join(self.value(each[0]) or ["?"]), filled)
        return None if isinstance(filled, Unknown) else _result(re.sub(r"\\(?=\*)|['\"]", "", put_in))

    def _of_command(self, text: str) -> str | None:
        """Return what `pwd`, `dirname "$0"`, `basename F .sh` or `cd "$X/.." && pwd` prints; None of any other."""
        words = self._inner(text).made()
        match [word for word in words if not isinstance(word, Unknown)]:
            case ["pwd"]:
                return str(Path.cwd())
            case ["dirname", file]:
                return str(Path(file).parent)
            case ["basename", file, *end] if len(words) == 2 + len(end) and len(end) < 2:
                return Path(file).name.removesuffix(end[0] if end else "")
            case ["cd", folder, "&&", "pwd"]:
                return os.path.abspath(folder)
        return None


def _result(terms: str) -> int | None:
    if not re.fullmatch(r"[-+*/%()\d\s<>=!]+", terms):
        return None
    try:
        return _number(ast.parse(terms.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError, MemoryError):
        return None


def _number(node: ast.AST) -> int:
    if isinstance(node, ast.BinOp):
        return int(OPERATIONS[type(node.op)](_number(node.left), _number(node.right)))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(OPERATIONS[type(node.ops[0])](_number(node.left), _number(node.comparators[0])))
    return int(ast.literal_eval(node))


def _spread(word: Word, elements: Sequence[str], quoted: bool, *, whole: bool) -> list[Word]:
    """Put the value of a variable into a word: outside quotes its spaces end words, and an array has a word each."""
    if quoted and not whole:
        pieces = [*elements[:1]] or [""]
    elif quoted:
        pieces = [*elements]
    else:
        pieces = [piece for each in elements for piece in _split(each)]
    if not pieces:
        word.begun = (quoted and not whole) or bool(word.text)
        return [word]
    word.add(pieces[0])
    rest = [Word(begun=True, quoted=quoted) for _ in pieces[1:]]
    for each, piece in zip(rest, pieces[1:], strict=True):
        each.add(piece)
    return [word, *rest]


def _split(text: str) -> list[str]:
    """Return the words of a value. Of an unknown one, those are unknown that have its unknown part."""
    if not isinstance(text, Unknown) or re.search(r"\s", text.part):
        return [text] if isinstance(text, Unknown) else text.split()
    of = [Unknown.of(each, text.part, text.why) if text.why or text.part in each or "$" in each else each
          for each in text.split()]  # fmt: skip
    return of or [text]


def _end(text: str, char: str, start: int) -> int:
    found = text.find(char, start)
    return len(text) if found < 0 else found


def _closing(text: str, at: int, opens: str, closes: str) -> int:
    """Return the place behind what closes the parenthesis or brace here."""
    depth = 0
    for place in range(at, len(text)):
        depth += {opens: 1, closes: -1}.get(text[place], 0)
        if not depth:
            return place + 1
    return len(text)
