"""Read the commands of a shell script, word by word as bash makes them, without running anything.

Variables, arrays and here-documents that the script itself sets are put in. What only bash could know (`$1`,
`$(date)`, a variable of the environment) stays as it is written, and its word is marked `Unknown`.
"""

from __future__ import annotations

import ast
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
DECLARES = ("export", "readonly", "declare", "typeset", "local")
KEYWORDS = ("then", "else", "do", "if", "elif", "while", "!", "time", "{")
DEEPEST = 3
TRAINER = re.compile(r"openrlhf\.cli|\btrl\b|\bswift\b|\bllamafactory-cli\b")
OF_A_WORD = 64  # characters that a word counts for beside its own
MOST_PUT_IN = 1 << 24  # characters in place of variables, in a whole script: A=$A$A doubles them
# Those of bash, which rounds a quotient towards 0.
OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Mod: math.fmod,
}  # fmt: skip
REDIRECTION = re.compile(r"\d*(?:&>>?|>>?&?|<(?!<))|\d*<<-?|<<<")
OPERATORS = ("&&", "||", "|&", ";;", "|", "&", ";", "\n", "(", ")")


class TooMuch(ValueError):
    """A script whose variables make too much text."""


class Unknown(str):
    """A word with a part that only bash could know, as `$LR`: its text is the word as it is written."""

    part: str

    @staticmethod
    def of(text: str, part: str) -> Unknown:
        word = Unknown(text)
        word.part = part
        return word


@dataclass(frozen=True)
class Command:
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)  # variables that the script gives to this command
    around: list[str] = field(default_factory=list)  # words of the command that has this one in quotes: srun bash -c


@dataclass
class _Word:
    text: str = ""
    begun: bool = False  # a word may be empty: ''
    unknown: str | None = None
    array: list[str] | None = None  # the elements, in NAME=( … )

    def made(self) -> str:
        return self.text if self.unknown is None else Unknown.of(self.text, self.unknown)


@dataclass(frozen=True)
class _Operator:
    text: str


def commands(text: str, file: Path | None = None) -> Iterator[Command]:
    """Yield the commands of a script in their order, those inside quotes (`bash -c "…"`) in place of the word."""
    own = {name: [str(file)] for name in ("0", "BASH_SOURCE") if file is not None}
    yield from _Reader(text, {"HOME": [str(Path.home())], **own}, {}, _Room()).commands()


class _Room:
    """The room that is left for texts in place of variables."""

    def __init__(self) -> None:
        self.left = MOST_PUT_IN

    def take(self, texts: Sequence[str]) -> Sequence[str]:
        self.left -= sum(map(len, texts)) + OF_A_WORD * len(texts)
        if self.left < 0:
            raise TooMuch(f"its variables make more than {MOST_PUT_IN:,} characters")
        return texts


class _Reader:
    def __init__(
        self, text: str, known: dict[str, list[str]], exported: dict[str, str], room: _Room, depth: int = 0
    ) -> None:
        self.text, self.at, self.room = text, 0, room
        self.depth = depth  # of quoted commands within quoted commands
        self.known = known  # a variable has one element, an array any number
        self.exported = exported
        self.used: set[str] = set()

    # ---- commands ----

    def commands(self) -> Iterator[Command]:
        words: list[_Word] = []
        documents: list[str] = []  # delimiters of the here-documents that begin after this line
        for token in self._tokens():
            if isinstance(token, _Word):
                words.append(token)
            elif token.text.startswith("<<"):
                documents.append(token.text[2:])
            else:
                target = words[-1].text if words and documents else None
                if token.text == "\n":
                    for delimiter in documents:
                        body = self._document(delimiter)
                        if words and words[0].text == "read" and target is not None:
                            self.known[target] = [body]
                    documents = []
                yield from self._command(words)
                words = []

    def _command(self, words: list[_Word]) -> Iterator[Command]:
        while words and words[0].text in KEYWORDS:
            words = words[1:]
        if words and words[0].text in ("echo", "printf"):
            return
        given: dict[str, str] = {}
        declares = bool(words) and words[0].text in DECLARES
        exports = declares and words[0].text == "export"
        rest = words[1:] if declares else words
        while rest and (found := ASSIGNMENT.match(rest[0].text)) is not None:
            word, rest = rest[0], rest[1:]
            value = word.array if word.array is not None else [word.text[found.end() :]]
            given[found[1]] = " ".join(value)
            if declares or not _follows(rest):
                if word.unknown is not None:
                    value = [Unknown.of(value[0], word.unknown)]
                self._assign(found[1], value, more=bool(found[2]))
        if declares or not rest:
            if exports:
                names = [*given, *(word.text for word in rest)]
                self.exported |= {name: " ".join(self.known[name]) for name in names if name in self.known}
            return
        inner = [word for word in rest if self.depth < DEEPEST and _has_command(word.text)]
        if inner:
            for word in inner:
                reader = _Reader(f"{word.text}\n", self.known, self.exported | given, self.room, self.depth + 1)
                reader.used = self.used
                around = [each.text for each in rest[: rest.index(word)]]
                for command in reader.commands():
                    yield replace(command, around=[*around, *command.around])
            return
        environment = {name: value for name, value in (self.exported | given).items() if name not in self.used}
        self.room.take([*environment])
        yield Command([word.made() for word in rest], environment)

    def _assign(self, name: str, value: list[str], *, more: bool) -> None:
        before = self.known.get(name, []) if more else []
        joined = before and len(before) == len(value) == 1
        self.known[name] = [before[0] + value[0]] if joined else [*before, *value]

    def _document(self, delimiter: str) -> str:
        """Return a here-document and go on behind it."""
        found = re.compile(rf"^[ \t]*{re.escape(delimiter)}[ \t]*$", re.M).search(self.text, self.at)
        body = self.text[self.at : found.start() if found else len(self.text)]
        self.at = found.end() if found else len(self.text)
        body = re.sub(r"\\\n", " ", body)
        return re.sub(r"\$\{?(\w+)\}?", lambda each: " ".join(self._known(each[1]) or [each[0]]), body)

    def _known(self, name: str) -> Sequence[str]:
        """Return the elements of a variable, to be put in; none if it is not known."""
        return self.room.take(self.known.get(name, []))

    # ---- words ----

    def _tokens(self) -> Iterator[_Word | _Operator]:
        """Yield words and what ends a command. Redirections are left out with the file that they name."""
        word = _Word()
        while self.at < len(self.text):
            char = self.text[self.at]
            redirection = None if _goes_on(word, char) else REDIRECTION.match(self.text, self.at)
            if char == "(" and word.text.endswith("=") and ASSIGNMENT.fullmatch(word.text):
                word.array = self._array()
            elif char in " \t\r" or char == "\n" or self._operator() or redirection:
                if word.begun:
                    yield word
                word = _Word()
            if word.array is not None:
                yield word
                word = _Word()
            elif char in " \t\r":
                self.at += 1
            elif char == "#" and not word.begun:
                self.at = _end(self.text, "\n", self.at)
            elif self.text.startswith("\\\n", self.at) or self.text.startswith("\\\r\n", self.at):
                self.at = self.text.index("\n", self.at) + 1
            elif redirection:
                self.at = redirection.end()
                yield from self._redirected(redirection[0])
            elif operator := self._operator():
                self.at += len(operator)
                yield _Operator(operator)
            else:
                made = self._part(word)
                yield from made[:-1]
                word = made[-1]
        if word.begun:
            yield word
        yield _Operator("\n")

    def _operator(self) -> str | None:
        return next((each for each in OPERATORS if self.text.startswith(each, self.at)), None)

    def _redirected(self, operator: str) -> Iterator[_Operator]:
        """Skip the word behind a redirection; a here-document's is its delimiter."""
        found = re.compile(r"[ \t]*(?:'([^'\n]*)'|\"([^\"\n]*)\"|\\?([^\s;|&]*))").match(self.text, self.at)
        if found is not None:
            self.at = found.end()
            if operator.lstrip("0123456789") in ("<<", "<<-"):
                yield _Operator(f"<<{found[1] or found[2] or found[3] or ''}")

    def _array(self) -> list[str]:
        """Read the elements of `NAME=( … )`, whose `NAME=` has just been read."""
        self.at += 1
        inner = _Reader(self.text, self.known, self.exported, self.room)
        inner.at, elements = self.at, []
        for token in inner._tokens():
            if isinstance(token, _Word):
                elements.append(token.made())
            elif token.text == ")":
                break
        self.at = inner.at
        return elements

    def _part(self, word: _Word) -> list[_Word]:
        """Read one part of a word: a quoted text, a variable or one character. A variable may make several words."""
        char, word.begun = self.text[self.at], True
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
            self._computed(word, self.text[self.at : end + 1])
            self.at = end + 1
        else:
            word.text += char
            self.at += 1
        return [word]

    def _double_quoted(self, word: _Word) -> list[_Word]:
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

    def _dollar(self, word: _Word, *, quoted: bool) -> list[_Word]:
        """Put in the value of a variable; what is not known stays as it is written."""
        text, at = self.text, self.at
        if text.startswith("$(", at):
            self.at = _closing(text, at + 1)
            self._computed(word, text[at : self.at])
            return [word]
        plain = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])").match(text, at)
        braced = re.compile(r"\$\{([A-Za-z_]\w*)(\[[@*0]\])?(?::?[-=]([^{}]*))?\}").match(text, at)
        found = braced or plain
        if found is None:
            end = _end(text, "}", at) + 1 if text.startswith("${", at) else at + 1
            if end == at + 1:
                word.text += "$"
            else:
                self._unknown(word, text[at:end])
            self.at = end
            return [word]
        self.at = found.end()
        name = found[1]
        if name not in self.known and braced and braced[3] is not None:
            word.text += self._default(braced[3])
            return [word]
        if name not in self.known:
            self._unknown(word, found[0])
            return [word]
        self.used.add(name)
        return _spread(word, self._known(name), quoted, whole=bool(braced and braced[2] not in (None, "[0]")))

    def _computed(self, word: _Word, text: str) -> None:
        """Put in what `$((8 * 2))` or `$(expr 16 / $n)` is; any other command's output only bash knows."""
        if (folder := self._folder(re.sub(r"^\$\(|^`|[)`]$", "", text))) is not None:
            word.text += folder
            return
        inner = re.fullmatch(r"\$\(\((.*)\)\)|(?:\$\(|`)\s*expr\s(.*?)[)`]", text, re.S)
        terms = (inner[1] or inner[2] or "") if inner else ""
        known = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda each: " ".join(self._known(each[1]) or ["?"]), terms)
        result = _result(known.replace("\\*", "*").replace("'", "").replace('"', ""))
        if result is None:
            self._unknown(word, text)
        else:
            word.text += str(result)

    def _folder(self, text: str) -> str | None:
        """Return the folder that `pwd`, `dirname "$0"` or `cd "$X/.." && pwd` is; None for another command."""
        words = [
            token.made() if isinstance(token, _Word) else token.text
            for token in _Reader(text, self.known, {}, self.room)._tokens()
        ]
        match [word for word in words if word != "\n" and not isinstance(word, Unknown)]:
            case ["pwd"]:
                return str(Path.cwd())
            case ["dirname", file]:
                return str(Path(file).parent)
            case ["cd", folder, "&&", "pwd"]:
                return os.path.abspath(folder)
        return None

    def _default(self, text: str) -> str:
        inner = _Reader(text.strip("\"'"), self.known, self.exported, self.room)
        return " ".join(token.text for token in inner._tokens() if isinstance(token, _Word))

    @staticmethod
    def _unknown(word: _Word, part: str) -> None:
        word.text += part
        word.unknown = word.unknown or part


def _result(terms: str) -> int | None:
    """Return what bash makes of sums, products and quotients of whole numbers; None for anything else."""
    try:
        return _number(ast.parse(terms.strip(), mode="eval").body) if re.fullmatch(r"[-+*/%()\d\s]+", terms) else None
    except (SyntaxError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError, MemoryError):
        return None


def _number(node: ast.AST) -> int:
    if isinstance(node, ast.BinOp):
        return int(OPERATIONS[type(node.op)](_number(node.left), _number(node.right)))
    return int(ast.literal_eval(node))


def _spread(word: _Word, elements: Sequence[str], quoted: bool, *, whole: bool) -> list[_Word]:
    """Put the value of a variable into a word: outside quotes its spaces end words, and an array has a word each."""
    if quoted and not whole:
        pieces = [*elements[:1]] or [""]
    elif quoted:
        pieces = [*elements]
    else:
        pieces = [piece for each in elements for piece in ([each] if isinstance(each, Unknown) else each.split())]
    if not pieces:
        word.begun = quoted or bool(word.text)
        return [word]
    word.text += pieces[0]
    word.unknown = word.unknown or getattr(pieces[0], "part", None)
    return [word, *(_Word(piece, True, getattr(piece, "part", None)) for piece in pieces[1:])]


def _follows(rest: list[_Word]) -> bool:
    """Whether a command follows assignments: then they are its own, and no variables of the script."""
    return any(ASSIGNMENT.match(word.text) is None for word in rest)


def _has_command(text: str) -> bool:
    """Recognize a command of a trainer in one word: it was quoted."""
    found = TRAINER.search(text)
    return found is not None and re.compile(r"\s--").search(text, found.end()) is not None


def _goes_on(word: _Word, char: str) -> bool:
    """A digit inside a word begins no redirection."""
    return char.isdigit() and word.begun


def _end(text: str, char: str, start: int) -> int:
    found = text.find(char, start)
    return len(text) if found < 0 else found


def _closing(text: str, at: int) -> int:
    """Return the place behind the parenthesis that closes the one here."""
    depth = 0
    for place in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place + 1
    return len(text)
