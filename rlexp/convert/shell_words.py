"""The words of a shell script: as written (`ShellTokens`), and as bash makes them (`Expansion`). Nothing is run.

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
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OF_A_WORD = 64  # characters that a word counts for beside its own
DEEPEST = 100  # of parentheses in each other
LONGEST = 4096  # of a value that is cut
MOST_PUT_IN = 1 << 24  # characters in place of variables, in a whole script: A=$A$A doubles them
# Those of bash, which rounds a quotient towards 0.
OPERATIONS: Mapping[type[ast.AST], Callable[[int, int], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Mod: math.fmod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:\[[^\]]*\])?\+?=")
ARRAY = re.compile(r"([A-Za-z_]\w*\+?=)\((.*?)\)?", re.S)
HOME = re.compile(r"\A((?:[A-Za-z_]\w*\+?=)?)~(?=/|$)")
CONTINUED = re.compile(r"\\\r?\n")
BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n|\\[ \t\r]*\Z|#.*)+")  # with comments and the ends of continued lines
TARGET = r"(?P<target>[<>]\((?:[^()\n]|\([^()\n]*\))*\)|(?:\"[^'\"\n]*\"|'[^'\"\n]*'|)(?:\$\([^()\n]*\)|[^\s;|&])*)"
LEFT_OUT = re.compile(rf"{BLANK.pattern}|\d*(?:&>>?|>>?&?|<(?!<)|<<<|<<-?)[ \t]*{TARGET}")  # with redirections
OPERATOR = re.compile(r"&&|\|\||\|&|;;&|;;|;&|[|&;\n()<>]|\Z")
VARIABLE = r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])"
PART = re.compile(rf"{VARIABLE}|[^\s'\"\\$`;|&()<>]+|.", re.S)
QUOTED_PART = re.compile(rf"{VARIABLE}|[^\"\\$]+|.", re.S)
Fields = list[list[str]]  # the words that one becomes, with the pieces of each: without a piece it is none
BRACED = re.compile(r"\$\{(#(?=\w))?([A-Za-z_]\w*|[0-9]+|[@*#])(\[[^\]]*\])?(.*)\}", re.S)


PLACES = re.compile(r"\$\{!([A-Za-z_]\w*)\[[@*]\]\}")  # of the elements of an array


class TooMuch(ValueError):
    """A script that is too deep, or whose variables make too much text."""


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


def joined(texts: Sequence[str], by: str = "") -> str:
    """Return one text of several; it is unknown if one of them is."""
    unknown = next((each for each in texts if isinstance(each, Unknown)), None)
    text = by.join(texts)
    return text if unknown is None else Unknown.of(text, unknown.part, unknown.why)


def like(word: str, text: str) -> str:
    """Return a text that is made of a word; it is unknown if the word is."""
    return Unknown.of(text, word.part, word.why) if isinstance(word, Unknown) else text


# ---- words as they are written ----


@dataclass(frozen=True)
class ShellToken:
    """A word or an operator as it is written; at the end of the script it has no text."""

    text: str
    at: int
    line: int
    operator: bool


class ShellTokens:
    """The words and operators of a script. Redirections are left out with the file that they name."""

    def __init__(self, text: str, line: int = 1) -> None:
        self.text, self.at, self.first_line = text if text.endswith("\n") else f"{text}\n", 0, line
        self.ends = [each.start() for each in re.finditer("\n", text)]
        self.in_test = False  # in [[ … ]]: < and > compare
        self.delimiters: list[str] = []  # of the here-documents that begin behind this line
        self.documents: list[tuple[str, bool]] = []  # of the last command; whether no variable is put in
        self.token = self._read()

    def take(self) -> ShellToken:
        """Return this token, and go to the next."""
        token, self.token = self.token, self._read()
        return token

    def take_match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Return what begins with this token, if it is as the pattern says, and go behind it."""
        if (match := pattern.match(self.text, self.token.at)) is not None:
            self.at = match.end()
            self.take()
        return match

    def take_command(self, *ends: str) -> list[str]:
        """Return the words of a simple command, and go behind it."""
        self.documents, words, tests = [], list[str](), self.token.text == "[["
        while self.token.text not in ("", "\n", *ends) and (tests or not self.token.operator):
            tests = self.in_test = tests and self.token.text != "]]"
            words.append(self.take().text)
        self.in_test = False
        return words

    def _read(self) -> ShellToken:
        left_out = BLANK if self.in_test else LEFT_OUT
        while (match := left_out.match(self.text, self.at)) is not None:
            self.at = match.end()
            if re.match(r"\d*<<(?!<)", match[0]):
                self.delimiters = [*self.delimiters, match["target"]]  # a copy of the tokens has its own
        at, line = self.at, self.first_line + bisect(self.ends, self.at)
        if (operator := OPERATOR.match(self.text, at)) is None:
            return ShellToken(self._word(), at, line, operator=False)
        self.at = operator.end()
        if operator[0] == "\n":
            self._read_documents()
        return ShellToken(operator[0], at, line, operator=True)

    def _word(self) -> str:
        """Return the word here; `NAME=( … )` is one."""
        word = ""
        while self.at < len(self.text) and self.text[self.at] not in " \t\r\n;|&()<>":
            end = part_end(self.text, self.at)
            part, self.at = self.text[self.at : end], end
            word += "" if CONTINUED.fullmatch(part) else part
        if self.text.startswith("(", self.at) and ASSIGNMENT.fullmatch(word):
            start, self.at = self.at, self.at + 1
            while self._read().text not in ("", ")"):
                pass
            word += self.text[start : self.at]
        return word

    def _read_documents(self) -> None:
        for delimiter in self.delimiters:
            name = re.sub(r"['\"\\]", "", delimiter)
            end = re.compile(rf"^[ \t]*{re.escape(name)}[ \t\r]*$|\Z", re.M).search(self.text, self.at)
            start, self.at = self.at, end.end() if end else len(self.text)
            self.documents.append((self.text[start : end.start() if end else self.at], name != delimiter))
        self.delimiters = []


def part_end(text: str, at: int, *, quoted: bool = False) -> int:
    """Return where the part of a word ends that begins here: a quoted text, a variable or plain characters."""
    char = text[at]
    if text.startswith(("$(", "${"), at):
        return closing(text, at + 1)
    if char == "\\":
        return at + (3 if text.startswith("\\\r\n", at) else 2)
    if char in "'`" and not quoted:
        end = text.find(char, at + 1)
        return len(text) if end < 0 else end + 1
    if char == '"' and not quoted:
        at += 1
        while at < len(text) and text[at] != '"':
            at = part_end(text, at, quoted=True)
        return at + 1
    match = (QUOTED_PART if quoted else PART).match(text, at)
    return match.end() if match else at + 1


def parts(text: str, *, quoted: bool = False) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = part_end(text, at, quoted=quoted)
        yield text[at:end]
        at = end


def closing(text: str, at: int) -> int:
    """Return the place behind what closes the parenthesis or brace here."""
    depth = 0
    for match in re.compile(r"[()]" if text[at] == "(" else r"[{}]").finditer(text, at):
        depth += 1 if match[0] == text[at] else -1
        if depth > DEEPEST and match[0] == "(":
            raise TooMuch("its commands are too deep in each other")
        if not depth:
            return match.end()
    return len(text)


# ---- words as bash makes them ----


class Expansion:
    """What bash makes of words, with the variables that are `known`: a variable has one element, an array any number.
    `args` are the script's own arguments; None: they are not known."""

    def __init__(self, known: dict[str, list[str]], args: list[str] | None) -> None:
        self.known, self.args, self.room = known, args, MOST_PUT_IN
        self.folder: str | None = str(Path.cwd())  # where the script is, as far as it is known
        self.used: set[str] = set()

    def words(self, text: str, *, operators: bool = False) -> list[str]:
        """Return the words of a text; operators among them, if they are asked for."""
        tokens, words = ShellTokens(text), list[str]()
        while tokens.token.text:
            token = tokens.take()
            words += self.split(token.text) if not token.operator else [token.text] if operators else []
        return [word for word in words if word != "\n"]

    def split(self, word: str) -> list[str]:
        """Return the words that one becomes."""
        return [joined(pieces) for pieces in self._fields(word, quoted=ASSIGNMENT.match(word) is not None) if pieces]

    def one(self, word: str) -> str:
        """Return the word that one becomes where spaces in variables end none: in an assignment, or in [[ … ]]."""
        return joined([joined(pieces) for pieces in self._fields(word, quoted=True)], " ")

    def filled(self, text: str) -> str:
        """Return a here-document or a sum with the values of its variables."""
        fields: Fields = [[]]
        self._put_quoted(fields, text, escapes="$`\\\n")
        return joined([joined(pieces) for pieces in fields], " ")

    def value(self, name: str) -> Sequence[str] | None:
        """Return the elements of a variable, to be put in; None if it is not known."""
        self.used.add(name)
        if name in self.known:
            return self.taken(self.known[name])
        if self.args is None or not re.fullmatch(r"[1-9]\d*|[@*#]", name):
            return None
        if name.isdigit():
            return self.taken(self.args[int(name) - 1 : int(name)] or [""])
        return [str(len(self.args))] if name == "#" else self.taken(self.args)

    def assign(self, name: str, value: list[str]) -> None:
        """Give a variable a value that a word gives it: `${NAME:=value}`."""
        self.known[name] = value

    def taken(self, texts: Sequence[str]) -> Sequence[str]:
        """Return texts that are put in, if there is room for them."""
        self.room -= sum(map(len, texts)) + OF_A_WORD * len(texts)
        if self.room < 0:
            raise TooMuch(f"its variables make more than {MOST_PUT_IN:,} characters")
        return texts

    # ---- the parts of a word ----

    def _fields(self, word: str, *, quoted: bool) -> Fields:
        fields: Fields = [[]]
        word = array[1] if (array := ARRAY.fullmatch(word)) else word
        for part in parts(HOME.sub(lambda match: f"{match[1]}{Path.home()}", word, count=1)):
            self._put(fields, part, quoted=quoted)
        return fields

    def _put(self, fields: Fields, part: str, *, quoted: bool) -> None:
        """Put in what one part of a word becomes."""
        if part.startswith("${"):
            self._put_braced(fields, part, quoted)
        elif part.startswith(("$(", "`")):
            fields[-1].append(self._computed(part))
        elif part[0] == "$" and len(part) > 1:
            value = self.value(part[1:])
            value = [joined(value, " ")] if quoted and part == "$*" and value is not None else value
            spread(fields, [Unknown.of(part, part)] if value is None else value, quoted, whole=part in ("$@", "$*"))
        elif part[0] == '"':
            self._put_quoted(fields, part[1:].removesuffix('"'), escapes='"$`\\\n')
        elif part[0] == "'":
            fields[-1].append(part.strip("'"))
        else:
            fields[-1].append(part.removeprefix("\\"))

    def _put_quoted(self, fields: Fields, text: str, escapes: str) -> None:
        if not text:
            fields[-1].append("")
        for part in parts(text, quoted=True):
            if part[0] == "$":
                self._put(fields, part, quoted=True)
            elif part[0] == "\\" and part[1:] in escapes:
                fields[-1].append(part[1:].strip("\n"))
            else:
                fields[-1].append(part)

    def _put_braced(self, fields: Fields, part: str, quoted: bool) -> None:
        """Put in `${NAME}`, `${#NAME}`, `${!NAME[@]}`, `${NAME:-default}`, `${NAME%.sh}` and their like."""
        if (array := PLACES.fullmatch(part)) is not None and array[1] in self.known:
            spread(fields, [str(place) for place in range(len(self.known[array[1]]))], quoted, whole=True)
            return
        if (match := BRACED.fullmatch(part)) is None:
            fields[-1].append(Unknown.of(part, part))
            return
        counts, name, index, rest = match.groups()
        whole, value = name in "@*" or index in ("[@]", "[*]"), self.value(name)
        place = None if whole or index is None or value is None else self.result(index[1:-1])
        if value is not None and place is not None and place >= 0:
            value, index = value[place : place + 1] or [""], None
        if quoted and value is not None and (name == "*" or index == "[*]") and not counts:
            value = [joined(value, " ")]
        plain = not rest and (whole or index in (None, "[0]"))
        if value is None and whole and index and not counts:  # no variable of the environment is an array
            value = []
        if (default := re.match(r":?([-=+?])", rest)) is not None:
            missing = self.args is not None and name.isdigit() and int(name) > len(self.args)
            given = value is not None and not missing and (rest[0] != ":" or value not in ([""], []))
            if given and default[1] != "+":
                spread(fields, value or [], quoted, whole=whole)
            elif default[1] == "?" or (default[1] == "+" and value is None):
                fields[-1].append(Unknown.of(part, part))
            elif given or default[1] != "+":
                text = rest[default.end() :]
                unquoted = re.sub(r'(\\)?"', lambda each: '"' if each[1] else "", text)
                texts = [self.filled(unquoted)] if quoted else self.words(text)
                if default[1] == "=":
                    self.assign(name, [joined(texts, " ")])
                spread(fields, texts, quoted=True, whole=True)
            elif quoted:
                fields[-1].append("")
        elif counts and plain and value is not None:
            fields[-1].append(str(len(value) if whole else len("".join(value[:1]))))
        elif plain and value is not None:
            spread(fields, value, quoted, whole=whole)
        else:
            shaped = None if value is None or counts or index or len(value) != 1 else self._shaped(value[0], rest)
            spread(fields, [Unknown.of(part, part) if shaped is None else shaped], quoted)

    def _shaped(self, value: str, rest: str) -> str | None:
        """Return a value without its start (#, ##) or its end (%, %%), or with another part (/, //)."""
        if isinstance(value, Unknown):
            return value
        if len(value) > LONGEST:
            return None
        if rest in ("^^", ",,"):
            return value.upper() if rest == "^^" else value.lower()
        match = re.fullmatch(r"(##?|%%?|//?)(.*)", rest, re.S)
        if match is None:
            return None
        replaces = match[1][0] == "/"
        texts = [self.one(each) for each in (match[2].split("/", 1) if replaces else [match[2]])]
        if any("$" in each or "`" in each for each in texts):
            return None
        if replaces:
            pattern = fnmatch.translate(texts[0]).removesuffix(r"\z").removesuffix(r"\Z")
            return re.sub(pattern, lambda _: "".join(texts[1:]), value, count=len(match[1]) % 2)
        ends = range(len(value) + 1) if match[1] in ("#", "%%") else range(len(value), -1, -1)
        for end in ends:
            cut, kept = (value[:end], value[end:]) if match[1][0] == "#" else (value[end:], value[:end])
            if fnmatch.fnmatchcase(cut, texts[0]):
                return kept
        return value

    def _computed(self, text: str) -> str:
        """Return what `$((8 * 2))`, `$(expr 16 / $n)` or `$(basename "$M")` is; others only bash knows."""
        if (printed := self._of_command(re.sub(r"^\$\(|^`|[)`]$", "", text))) is not None:
            return printed
        inner = re.fullmatch(r"\$\(\((.*)\)\)|(?:\$\(|`)\s*expr\s(.*?)[)`]", text, re.S)
        result = self.result((inner[1] or inner[2] or "") if inner else "")
        return Unknown.of(text, text) if result is None else str(result)

    def result(self, terms: str) -> int | None:
        """Return what bash makes of sums, products, quotients and comparisons of whole numbers; None: not known."""
        filled = self.filled(terms)
        put_in = re.sub(r"[A-Za-z_]\w*", lambda each: " ".join(self.value(each[0]) or ["?"]), filled)
        return None if isinstance(filled, Unknown) else _result(re.sub(r"\\(?=\*)|['\"]", "", put_in))

    def _of_command(self, text: str) -> str | None:
        """Return what `pwd`, `dirname "$0"`, `basename F .sh`, `cd "$X/.." && pwd` or `echo "$X" | tr A-Z a-z` prints;
        None of any other."""
        words = [word for word in self.words(text, operators=True) if word != "--"]
        match words if not any(isinstance(each, Unknown) for each in words) else []:
            case ["pwd"]:
                return self.folder
            case ["dirname", file]:
                return str(Path(file).parent)
            case ["basename", file, *end] if len(end) < 2:
                return Path(file).name.removesuffix(end[0] if end else "")
            case ["cd", path, "&&", "pwd"] | ["readlink", "-f", path] | ["realpath", path] if self.folder is not None:
                return os.path.abspath(os.path.join(self.folder, path))
            case ["echo", word, "|", "tr", "[:upper:]" | "A-Z", "[:lower:]" | "a-z"]:
                return word.lower()
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


def spread(fields: Fields, elements: Sequence[str], quoted: bool, *, whole: bool = False) -> None:
    """Put in the value of a variable: outside quotes its spaces end words, and a whole array has a word each."""
    elements = elements if whole else elements[:1]
    if quoted:
        pieces = [*elements] if whole else [*elements] or [""]
    else:
        pieces = [piece for each in elements for piece in _split(each)]
    fields[-1] += pieces[:1]
    fields += [[piece] for piece in pieces[1:]]


def _split(text: str) -> list[str]:
    """Return the words of a value. Of an unknown one, those are unknown that have its unknown part."""
    if not isinstance(text, Unknown) or re.search(r"\s", text.part):
        return [text] if isinstance(text, Unknown) else text.split()
    of = [Unknown.of(each, text.part, text.why) if text.why or text.part in each or "$" in each else each
          for each in text.split()]  # fmt: skip
    return of or [text]
