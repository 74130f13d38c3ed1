"""Read the commands of a shell script, as bash would come to them, without running anything.

Variables, arrays, here-documents and functions that the script itself sets are put in. Branches and loops are followed
where their conditions are about known variables. Where only bash could know a condition, what the branch sets is
`Unknown`, and a command in it is `unsure`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlexp.convert.shell_words import ASSIGNMENT, Room, TooMuch, Unknown, Word, Words

__all__ = ("Command", "TooMuch", "Unknown", "commands")

DECLARES = ("export", "readonly", "declare", "typeset", "local")
KEYWORDS = {"then", "else", "do", "if", "elif", "while", "until", "!", "time", "exec", "{", "}", "fi", "done", "esac"}
ASKING = ("grep", "command", "which", "type", "curl", "pgrep", "nc", "ping", "diff", "cmp", "read", "python", "python3")
TESTS = ("[", "[[", "test", "((")
DEEPEST = 3
MOST_ROUNDS = 200  # of all loops of a script
ENDS = "exit"  # the last command of a script that ends before its text does
TRAINER = re.compile(r"openrlhf\.cli|\btrl\b|\bswift\b|\bllamafactory-cli\b")
NUMERIC = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


@dataclass(frozen=True)
class Command:
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)  # variables that the script gives to this command
    around: list[str] = field(default_factory=list)  # words of the command that has this one in quotes: srun bash -c
    line: int = 0
    unsure: str = ""  # the line that decides whether it runs, where that is not known
    loop: str = ""  # the variable of the loop that runs it several times
    used: frozenset[str] = frozenset()  # variables of the environment that the script reads too


@dataclass(frozen=True)
class Call:
    """How a script is called, as far as it is told."""

    arguments: list[str] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)  # whose values hold, whatever the script sets
    line: int | None = None  # of the command that is meant


def commands(text: str, file: Path | None = None, call: Call | None = None) -> Iterator[Command]:
    """Yield the commands of a script in their order, those inside quotes (`bash -c "…"`) in place of the word."""
    call = call or Call()
    own = {name: [str(file)] for name in ("0", "BASH_SOURCE") if file is not None}
    given = {name: [value] for name, value in call.variables.items()}
    known = {"HOME": [str(Path.home())], "PWD": [str(Path.cwd())], **own, **given}
    yield from _Reader(
        text if text.endswith("\n") else f"{text}\n", known, _Script(Room(), call.variables), call.arguments
    ).run()


# ---- what is known of a condition: True, False or None ----


def _and(one: bool | None, other: bool | None) -> bool | None:
    return False if False in (one, other) else None if None in (one, other) else True


def _not(one: bool | None) -> bool | None:
    return None if one is None else not one


class _Script:
    """What all readers of one script share."""

    def __init__(self, room: Room, given: Mapping[str, str]) -> None:
        self.room, self.given = room, given
        self.functions: dict[str, tuple[str, int]] = {}  # the text behind `{`, and the line before it
        self.exported: dict[str, str] = {}
        self.rounds = MOST_ROUNDS
        self.ended = False


@dataclass
class _Frame:
    """A branch, a loop or a group that is open."""

    kind: str
    outer: bool | None  # whether what is around it runs
    line: int
    live: bool | None = None  # whether its commands run
    taken: bool | None = False  # whether an earlier branch ran
    said: str = ""  # its condition, as it is written
    subject: str = ""  # of a case, or the variable of a loop
    items: list[str] = field(default_factory=list)  # that a loop has still to go through
    start: int = 0  # where the body or the condition of a loop begins
    name: str = ""  # of a function
    status: tuple[bool | None, bool] = (True, False)  # of the last command of a loop's last round
    goes_on: bool = False  # a round of a loop was left by `continue`


class _Reader(Words):
    def __init__(
        self, text: str, known: dict[str, list[str]], script: _Script, args: list[str] | None = None, depth: int = 0,
        line: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(text, known, script.room, args)
        self.script, self.depth, self.first_line = script, depth, line
        self.frames: list[_Frame] = []
        self.status: bool | None = True  # of the last command, as far as it is known
        self.tested = False  # it was a test, or a command whose status only bash knows
        self.chained: bool | None = True  # whether the command at hand runs, by && and ||
        self.before: dict[str, list[str] | None] = {}  # values that a function hides by `local`
        self.asked = ""  # the test before the command at hand, as it is written
        self.begun = 0  # where the command at hand begins

    @property
    def live(self) -> bool | None:
        return _and(self.frames[-1].live if self.frames else True, self.chained)

    @property
    def line(self) -> int:
        return self.first_line + self.text.count("\n", 0, self.begun)

    def run(self) -> Iterator[Command]:
        words: list[Word] = []
        documents: list[str] = []  # delimiters of the here-documents that begin after this line
        for token in self.tokens():
            if isinstance(token, Word):
                self.begun = self.begun if words else (token.end or self.at) - 1
                words.append(token)
                front = next((word.text for word in words if word.text not in KEYWORDS), "")
                self.splits = front not in ("[[", "case") or token.text in ("]]", "in")
                if token.text == "in" and [each.text for each in words[-3:-2]] == ["case"]:
                    yield from self._statement(words, "in")
                    words = []
                continue
            if token.text.startswith("<<"):
                documents.append(token.text[2:])
                continue
            if not self.splits and token.text != "\n":
                words.append(Word(token.text, begun=True))
                continue
            if token.text == "(" and (name := _defined(words, self.text[self.at : self.at + 9])):
                self._open("function", live=False, name=name)
                self.at, words = self.text.index("{", self.at) + 1, []
                self.frames[-1].start = self.at
                continue
            if token.text == "(" and all(word.text in KEYWORDS and not word.quoted for word in words):
                if self.text.startswith("(", self.at) and (end := self.text.find("))", self.at)) >= 0:
                    words += [Word("((", begun=True), Word(self.text[self.at + 1 : end], begun=True)]
                    self.at = end + 2
                    continue
                yield from self._statement(words, "(")
                self._open("(", live=self.live)
                words = []
                continue
            self.splits = True
            target = words[-1].text if words and documents else None
            reads = bool(words) and words[0].text == "read"
            yield from self._statement(words, token.text)
            words = []
            if self.script.ended:
                yield Command([ENDS], line=self.line)
                return
            if token.text == "\n":
                for delimiter in documents:
                    body = self.document(delimiter)
                    if reads and target is not None:
                        self._assign(target, [_stripped(body)], more=False)
                documents = []
            elif token.text == ")" and self.frames and self.frames[-1].kind == "(":
                self.frames.pop()
            elif token.text in (";;", ";&", ";;&"):
                self._pattern()

    # ---- branches and loops ----

    def _open(self, kind: str, *, live: bool | None, said: str = "", subject: str = "", name: str = "") -> None:
        frame = _Frame(kind, self.live, self.line, live=live, said=said, subject=subject, name=name)
        self.frames.append(frame)
        self.chained = True

    def _statement(self, words: list[Word], ends: str) -> Iterator[Command]:
        """Follow the keywords at the front of a command, and run the rest of it."""
        negated = False
        while words and not words[0].quoted and words[0].text in KEYWORDS:
            word, words = words[0], words[1:]
            negated = negated != (word.text == "!")
            self._keyword(word, words)
        front = words[0].text if words and not words[0].quoted else ""
        if front == "for":
            self._for(words)
        elif front == "case":
            self._open("case", live=False, subject=words[1].made() if words[1:] else "", said=_said(words))
            self._pattern()
        elif front == "function" and words[1:]:
            self._open("function", live=False, name=words[1].text)
            if words[2:] and words[2].text == "{":
                self.frames[-1].start = words[2].end
        elif words:
            yield from self._run(words)
            if negated and self.live is not False:
                self.status, self.tested = _not(self.status) if self.tested else None, True
        if ends in ("&&", "||"):
            self.asked = _said(words) if self.chained is not None else self.asked
            self.chained = self.status if ends == "&&" else _not(self.status)
        elif words or ends != "\n":
            self.chained = True

    def _keyword(self, word: Word, rest: Sequence[Word]) -> None:
        frame = self.frames[-1] if self.frames else None
        match word.text:
            case "if" | "while" | "until":
                self._open(word.text, live=self.live, said=_said([word, *rest]))
                self.frames[-1].start = word.end
            case "{" if frame is not None and frame.kind == "function" and not frame.start:
                frame.start = word.end
            case "{":
                self._open("{", live=self.live)
            case _ if frame is None:
                return
            case "then" | "do" if frame.kind in ("if", "while", "until"):
                known = self.status if self.tested else None
                holds = _not(known) if frame.kind == "until" else known
                frame.live = _and(frame.outer, _and(_not(frame.taken), holds))
                frame.taken = _not(_and(_not(frame.taken), _not(holds)))
            case "elif":
                frame.live, frame.said = _and(frame.outer, _not(frame.taken)), _said([word, *rest])
            case "else" if frame.kind == "if":
                frame.live = _and(frame.outer, _not(frame.taken))
            case "do" if frame.kind == "for":
                frame.start = word.end
            case "done":
                self._next_round(frame)
            case "fi" | "esac":
                if frame.outer and frame.taken is False:
                    self.status, self.tested = True, False
                self.frames.pop()
            case "}":
                if frame.kind == "function" and frame.outer is not False:
                    line = self.first_line + self.text.count("\n", 0, frame.start)
                    self.script.functions[frame.name] = (f"{self.text[frame.start : word.end - 1]}\n", line)
                self.frames.pop()

    def _for(self, words: Sequence[Word]) -> None:
        items = [word.made() for word in words[3:]] if [each.text for each in words[2:3]] == ["in"] else None
        self._open("for", live=self.live, subject=words[1].text if words[1:] else "", said=_said(words))
        frame, name = self.frames[-1], words[1].text if words[1:] else ""
        if name in self.script.given or frame.live is False:
            return
        if (
            frame.live
            and items is not None
            and not any(isinstance(each, Unknown) or re.search(r"[*?{]", each) for each in items)
        ):
            frame.items = items[1:]
            frame.live = frame.live if items else False
            self.known[name] = items[:1]
        elif re.fullmatch(r"\w+", name):
            self.known[name] = [Unknown.of(f"${name}", f"${name}", self._decides(frame))]

    def _next_round(self, frame: _Frame) -> None:
        """Go on behind a loop, or begin its next round."""
        ran = frame.live is True or frame.goes_on
        frame.status = (self.status, self.tested) if ran else frame.status
        again = frame.kind in ("while", "until") and frame.said not in ("while true", "while :")
        if ran and (again or frame.items):
            self.script.rounds -= 1
            if self.script.rounds < 0:
                raise TooMuch(f"its loops take more than {MOST_ROUNDS} rounds")
            self.at, frame.live, frame.taken, frame.goes_on = frame.start, frame.outer, False, False
            if not again:
                self.known[frame.subject], frame.items = frame.items[:1], frame.items[1:]
            return
        if frame.outer:
            self.status, self.tested = frame.status if frame.kind != "for" or not ran else (self.status, self.tested)
        self.frames.pop()

    def _pattern(self) -> None:
        """Read the patterns before the next commands of a `case`."""
        if not self.frames or self.frames[-1].kind != "case":
            return
        frame, patterns = self.frames[-1], list[str]()
        found = re.compile(r"(?:\s|#[^\n]*\n)*").match(self.text, self.at)
        self.at = found.end() if found else self.at
        if re.match(r"esac\b", self.text[self.at : self.at + 5]):
            return
        for token in self.tokens():
            if isinstance(token, Word):
                patterns.append(token.made())
            elif token.text == ")":
                break
            elif token.text == "\n":
                return
        known = [isinstance(each, str) and not isinstance(each, Unknown) for each in (frame.subject, *patterns)]
        fits = any(fnmatch.fnmatchcase(frame.subject, each) for each in patterns) if all(known) else None
        fits = True if patterns == ["*"] else fits
        frame.live = _and(frame.outer, _and(_not(frame.taken), fits))
        frame.taken = _not(_and(_not(frame.taken), _not(fits)))

    def _decides(self, frame: _Frame | None = None) -> str:
        """Name the line that decides whether what is at hand happens."""
        frame = frame or next((each for each in self.frames if each.live is None), None)
        if frame is None and self.chained is None:
            return f"line {self.line}, `{self.asked}`"
        return "" if frame is None else f"line {frame.line}, `{frame.said}`"

    # ---- commands ----

    def _run(self, words: list[Word]) -> Iterator[Command]:
        """Do what a command does to variables, and yield it if it is one that runs."""
        name = words[0].text
        if self.live is False:
            return
        unsure = self.chained is None
        self.status, self.tested = (None, True) if unsure or name in ASKING else (True, False)
        if name in TESTS or name in ("true", "false", ":"):
            self.status, self.tested = None if unsure else self._test(words), True
        elif name == "unset":
            for word in words[1:]:
                self.known.pop(word.text, None)
                self.script.exported.pop(word.text, None)
        elif name in ("echo", "printf", "trap", "alias"):
            return
        elif name in ("exit", "return", "break", "continue"):
            self._leave(name)
        elif self.live is None and (name == "shift" or (name == "set" and "--" in [word.text for word in words[1:2]])):
            self.args = None  # only bash knows whether they are changed
        elif name == "shift" and self.args is not None:
            self.args = self.args[int(words[1].text) if words[1:] and words[1].text.isdecimal() else 1 :]
        elif name == "set" and words[1:2] and words[1].text == "--":
            self.args = [word.made() for word in words[2:]]
        elif name in self.script.functions and self.depth < DEEPEST:
            text, line = self.script.functions[name]
            called = _Reader(text, self.known, self.script, [word.made() for word in words[1:]], self.depth + 1, line)
            called.used = self.used
            yield from self._within(called.run())
            for each, value in called.before.items():
                self.known.pop(each, None)
                self.known |= {} if value is None else {each: value}
        else:
            yield from self._simple(words)

    def _within(self, found: Iterator[Command]) -> Iterator[Command]:
        for command in found:
            yield replace(command, unsure=command.unsure or self._decides())

    def _leave(self, name: str) -> None:
        """Leave a loop, a function or the script, where that is known to happen."""
        if self.live is not True:
            return
        if name in ("break", "continue"):
            for frame in reversed(self.frames):
                frame.live = False
                if frame.kind in ("for", "while", "until"):
                    frame.goes_on, frame.items = name == "continue", frame.items if name == "continue" else []
                    return
        elif name == "return" and self.depth:
            self.at = len(self.text)
        else:
            self.script.ended = True

    def _simple(self, words: list[Word]) -> Iterator[Command]:
        given: dict[str, str] = {}
        declares = words[0].text in DECLARES
        rest = words[1:] if declares else words
        while rest and (found := ASSIGNMENT.match(rest[0].text)) is not None:
            word, rest = rest[0], rest[1:]
            value = word.array if word.array is not None else [word.made()[found.end() :]]
            if word.array is None and word.unknown is not None:
                value = [Unknown.of(value[0], word.unknown.part, word.unknown.why)]
            given[found[1]] = " ".join(value)
            if words[0].text == "local":
                self.before.setdefault(found[1], self.known.get(found[1]))
            if declares or not _follows(rest):
                self._assign(found[1], value, more=bool(found[2]), array=word.array is not None)
                self.used.discard(found[1])
        if declares or not rest:
            if words[0].text == "export":
                names = [*given, *(word.text for word in rest)]
                self.script.exported |= {each: " ".join(self.known[each]) for each in names if each in self.known}
            return
        inner = [word for word in rest if self.depth < DEEPEST and _has_command(word.text)]
        for word in inner:
            reader = _Reader(f"{word.text}\n", self.known, self.script, self.args, self.depth + 1, self.line)
            reader.used = self.used
            before, self.script.exported = self.script.exported, self.script.exported | given
            around = [each.text for each in rest[: rest.index(word)]]
            for command in self._within(reader.run()):
                yield replace(command, around=[*around, *command.around])
            self.script.exported = before
        if inner:
            return
        environment = self.script.exported | given
        self.room.take([*environment])
        loop = next((frame.subject for frame in reversed(self.frames) if frame.kind == "for"), "")
        yield Command([word.made() for word in rest], environment, line=self.line, unsure=self._decides(), loop=loop,
                      used=frozenset(self.used))  # fmt: skip

    def _assign(self, name: str, value: list[str], *, more: bool, array: bool = False) -> None:
        if name in self.script.given or self.live is False:
            return
        before = self.known.get(name, []) if more else []
        joined = before and not array
        said = f"{before[0]}{value[0]}" if joined else ""
        unknown = next((each for each in (*before, *value) if isinstance(each, Unknown)), None)
        if joined:
            value = [said if unknown is None else Unknown.of(said, unknown.part, unknown.why)]
        else:
            value = [*before, *value]
        if self.live is None and self.known.get(name) != value:
            value = [*before, Unknown.of(f"${name}", f"${name}", self._decides())]
        self.known[name] = value

    # ---- conditions ----

    def _test(self, words: Sequence[Word]) -> bool | None:
        """Say whether a test holds; None where only bash knows."""
        name, *said = (word.made() for word in words)
        if name in ("true", "false", ":"):
            return name != "false"
        if name == "((":
            result = self.result(said[0])
            return None if result is None else bool(result)
        said = said[:-1] if name in ("[", "[[") else said
        return _holds(said)


def _holds(said: list[str]) -> bool | None:
    """Say whether the words of `[ … ]` hold: && and || as well as -a and -o, and ! before one test."""
    for words, whole in ((("||", "-o"), False), (("&&", "-a"), True)):
        places = [place for place, word in enumerate(said) if word in words and 0 < place < len(said) - 1]
        if places:
            sides = _holds(said[: places[0]]), _holds(said[places[0] + 1 :])
            return _and(*sides) if whole else _not(_and(*map(_not, sides)))
    if said[:1] == ["!"]:
        return _not(_holds(said[1:]))
    if any(isinstance(each, Unknown) for each in said):
        return None
    match said:
        case ["-z" | "-n" as empty, text]:
            return bool(text) == (empty == "-n")
        case [text]:
            return bool(text)
        case [one, "=" | "==", other]:
            return fnmatch.fnmatchcase(one, other)
        case [one, "!=", other]:
            return not fnmatch.fnmatchcase(one, other)
        case [one, by, other] if by in NUMERIC and all(re.fullmatch(r"-?\d+", each) for each in (one, other)):
            first, second = int(one), int(other)
            return {"==": first == second, "!=": first != second, "<": first < second, "<=": first <= second,
                    ">": first > second, ">=": first >= second}[NUMERIC[by]]  # fmt: skip
    return None


def _stripped(text: str) -> str:
    """Return what `read` makes of a text."""
    return Unknown.of(text.strip(), text.part, text.why) if isinstance(text, Unknown) else text.strip()


def _said(words: Sequence[Word]) -> str:
    return " ".join(word.text for word in words)


def _defined(words: Sequence[Word], behind: str) -> str | None:
    """Return the name of a function that is defined here: `name() {`, `function name() {`."""
    named = words[1:] if len(words) == 2 and words[0].text == "function" else words
    is_one = len(named) == 1 and re.match(r"\)\s*\{", behind) and re.fullmatch(r"[\w-]+", named[0].text)
    return named[0].text if is_one else None


def _follows(rest: list[Word]) -> bool:
    """Whether a command follows assignments: then they are its own, and no variables of the script."""
    return any(ASSIGNMENT.match(word.text) is None for word in rest)


def _has_command(text: str) -> bool:
    """Recognize a command of a trainer in one word: it was quoted."""
    found = TRAINER.search(text)
    return found is not None and re.compile(r"\s--").search(text, found.end()) is not None
