"""The reader of shell scripts: the words of a command are those that bash makes, and no argument is lost."""

from __future__ import annotations

import contextlib
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlexp.convert.__main__ import main
from rlexp.convert.conversion import Conversion, ConvertError
from rlexp.convert.read import read
from rlexp.convert.shell import commands
from tests.convert.texts import COMMAND, FACTORY, OPENRLHF, SWIFT, SWIFT_LORA, conversion, values
from tests.helpers.paths import FILES


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("c --d org/x#500 --b 0.3", ["c", "--d", "org/x#500", "--b", "0.3"]),
        ("LR=5e-7  # rate\nc --lr $LR \\\n  --b 0.5 # end\n", ["c", "--lr", "5e-7", "--b", "0.5"]),
        ('M="a b"   # the policy\nc "$M" $M', ["c", "a b", "a", "b"]),
        ("c --b ${B:-64} ${C:=4096} ${D-x/y}", ["c", "--b", "64", "4096", "x/y"]),
        ("B=${B:-64}\nc $B", ["c", "64"]),
        ("X=(\n  --a 1 # one\n  --b 'q r'\n)\nX+=(--c)\nc \"${X[@]}\"", ["c", "--a", "1", "--b", "q r", "--c"]),
        ("X=\"--a 1\"\nX+=' --b 2'\nc $X", ["c", "--a", "1", "--b", "2"]),
        ("read -r -d '' X <<EOF\n  --a 1 \\\n  --b 2\nEOF\nc $X", ["c", "--a", "1", "--b", "2"]),
        ("c --t \"{% for m in x %}{{ m['y'] }}\"", ["c", "--t", "{% for m in x %}{{ m['y'] }}"]),
        ("c 'a  b' \"it's\" a\\ b \"\\$x\" ''", ["c", "a  b", "it's", "a b", "$x", ""]),
        ("if [[ 1 ]]; then\n  c --a 1\nfi", ["c", "--a", "1"]),
        ("M=full\nif [ \"$M\" = lora ]; then L=1e-4; elif [[ $M == f* ]]; then\nL=5\nelse L=2; fi\nc $L", ["c", "5"]),
        ("N=8\nif (( N > 4 )) && [ -z '' -a $N -ne 4 ]; then A=(--ring 2); fi\nc \"${A[@]}\"", ["c", "--ring", "2"]),
        ("M=b\ncase $M in\n a) L=1 ;;\n (b|c) L=2 ;;\n *) L=3 ;;\nesac\nc $L", ["c", "2"]),
        ("X=\nif [[ -n \"$X\" ]]; then A+=(--a); fi\n[ -n \"$X\" ] || A+=(--b)\n! [ 1 ] && A+=(--c)\nc \"${A[@]}\"",
         ["c", "--b"]),
        ("run() {\n local n=$1\n shift\n c --lr $n \"$@\"\n}\nrun 1e-6 --x 'a b'", ["c", "--lr", "1e-6", "--x", "a b"]),
        ("function run {\n c $# ${1%/*} ${1##*/} ${2:-d} ${A[@]:+--no}\n}\nrun a/b/m", ["c", "1", "a/b", "m", "d"]),
        ("i=0\nwhile [ $i -lt 3 ]; do i=$((i + 1)); A+=($i); done\nc ${A[*]}", ["c", "1", "2", "3"]),
        ("set -- --lr 5 --n x\nwhile [[ $# -gt 0 ]]; do\n case \"$1\" in --lr) L=$2; shift 2 ;; *) shift ;; esac\n"
         "done\nc $L", ["c", "5"]),
        ("[ ] && { exit 1; }\nL=${L:-${M:-o}/x}\nc ${L^^} ${L/o/p} $(basename a/b.sh .sh)", ["c", "O/X", "p/x", "b"]),
        ("read -r -d '' X <<'EOF'\n--a $y\nEOF\nc \"${X# }\"; exit 0\nc 2", ["c", "--a $y"]),
        ("i=0\nwhile [ $i -lt 2 ]; do read -d '' X <<EOF\n--a\nEOF\ni=$((i + 1)); A+=($X $i)\ndone\nc ${A[*]}",
         ["c", "--a", "1", "--a", "2"]),
        ("run() { cat > x <<EOF\n1\nEOF\nc $1\n}\nrun a", ["c", "a"]),
        (": ${X:=1}\n: \"${X:=2}\"\nc $X > >(tee -a log)", ["c", "1"]),
        ("c $(echo A/b | tr '[:upper:]' '[:lower:]') $(cd -- \"$(dirname -- /usr/y)\" && pwd)", ["c", "a/b", "/usr"]),
        ("A=(a 'b c'); for i in \"${!A[@]}\"; do B+=(\"${A[$i]}\" ${A[i + 1]}); done\nc \"${B[@]}\" $(realpath /usr)",
         ["c", "a", "b", "c", "b c", "/usr"]),
        ("[ ! -d / ] || c 1\nif [ -f /etc/passwd ]; then c 2; fi", ["c", "2"]),
        ("n=4\nc --a $(expr 16 / $n) $(expr 32 / $n / 3)", ["c", "--a", "4", "2"]),
        ("n=4 m=3\nc $((n)) $((8*16)) $(( (n + 1) * ${m} - 2 )) $((7 / 2)) $(((2 - 9) / 2)) $((9 % n))",
         ["c", "4", "128", "13", "3", "-3", "1"]),
        ("c `expr 3 \\* 4`", ["c", "12"]),
        *((f"c --b 0.5{end}", ["c", "--b", "0.5"]) for end in (
            "; echo x", " && echo x", " || exit 1", " | tee log", " |& tee log", " > log 2>&1", " &> log &",
            " 2>&1 | tee log", ";", " &>> log")),
    ],
)  # fmt: skip
def test_words_are_those_of_bash(script: str, words: list[str], tmp_path: Path) -> None:
    assert words in [command.words for command in commands(script)]
    told = tmp_path / "told"
    run = f"c() {{ printf '%s\\0' c \"$@\" > '{told}'; }}\n{script}\nwait"  # a command may be in the background
    subprocess.run(["bash", "-c", run], check=True, timeout=240, capture_output=True, cwd=tmp_path)
    assert told.read_text(encoding="utf-8").split("\0")[:-1] == words


def statements(draw: random.Random, depth: int) -> list[str]:
    """Return some lines of a script whose conditions are about what it sets itself."""
    name, value = draw.choice("XYZ"), draw.choice(["a", "b", "'a b'", '"$X"', "${Y%b}", "$Z$X", "${X:-q}", "''"])
    one = draw.choice(["a", "'b c'", '"$X"', '"${Y%b}"', '"$Z$X"'])
    test = draw.choice([f'[ "$X" = {one} ]', "[[ -n $Y && $X != a ]]", f"[ -z {one} -o 1 -gt 2 ]", "(( ${#A[@]} + 1 ))",
                        '! [[ "$Z" == a* ]]', "true", "false", "((n % 2))"])  # fmt: skip
    inner = statements(draw, depth - 1) if depth else ['c "$X"']
    other = statements(draw, depth - 1) if depth else [":"]
    lines: list[str] = draw.choice(
        [
            [f"{name}={value}", "A=()"],
            [f"{name}+={value}", 'c "$X" $Y'],
            ['A+=("$X" $Y)', 'c "${A[@]}" ${A[*]:+--n}'],
            ['c "${A[@]}" "$Z" x"${A[@]}"'],
            [f"if {test}; then", *inner, "else", *other, "fi"],
            [f"if {test}; then :; elif {test}", "then", *inner, "fi"],
            [f"{test} && {{", *inner, "} || {", *other, "}"],
            [f"{test} || {name}={value}"],
            [f"for {name} in {value} $X k; do", *inner, "done"],
            ["n=0", "while [ $n -lt 2 ]; do", "n=$((n + 1))", *inner, "done"],
            [f'case "${name}" in a|b) {name}=z ;; *b) :', *inner, ";; *)", *other, ";; esac"],
            ["f() {", "local k=$1", *inner, 'c "$k" $#', "}", f"f {value} $X"],
            [f"for {name} in 1 2 3; do", f"{test} && continue", *inner, f"{test} && break", "done"],
        ]
    )
    return lines + (statements(draw, depth - 1) if depth and draw.random() < 0.6 else [])


def test_random_scripts_have_the_commands_that_bash_runs(tmp_path: Path) -> None:
    draw = random.Random(0)
    for _ in range(150):
        script = "\n".join(["X=a Y='b c' Z= n=1 A=()", *statements(draw, 3), *statements(draw, 2), 'c "$X" "$Y" "$Z"'])
        run = f"c() {{ printf '%s\\0' \"$@\"; printf '\\n'; }}\n{script}\n"
        told = subprocess.run(["bash", "-c", run], timeout=240, capture_output=True, cwd=tmp_path, text=True).stdout
        ours = [each.words[1:] for each in commands(script) if each.words[0] == "c"]
        assert ours == [line.split("\0")[:-1] for line in told.splitlines()], script


def test_no_script_is_a_traceback() -> None:
    """Pieces of scripts in any order: a quote that is open, a command inside itself."""
    draw = random.Random(0)
    pieces = [*"\"'$(){}\\\n# =1>|&;`<~é\t", "${", "X=", "$X", "--a", "<<EOF", "EOF", "$(", ">&2", "trl dpo --x", ":-"]
    pieces += ["[@]", "+=", "\r\n", "read X "]
    for _ in range(500):
        script = "".join(draw.choices(pieces, k=draw.randint(1, 14)))
        assert all(isinstance(word, str) for command in commands(script) for word in command.words)
        with contextlib.suppress(ConvertError):
            conversion(COMMAND + script, None, 8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{OPENRLHF} --learning_rate $LR", "learning_rate=$LR: LR has no value in the script. Set it there, as LR="),
        (f"{OPENRLHF} --max_len $((8*X))", "max_len=$((8*X)): only bash knows what $((8*X)) is."),
        (
            f"D=$(date)\nS=$D/x\n{OPENRLHF} --ref_pretrain $S",
            "ref_pretrain=$(date)/x: only bash knows what $(date) is.",
        ),
        (f"{OPENRLHF} --seed $(c 'Authorization: Bearer x1')", "seed=$(c 'Authorization: …'): only bash knows what "),
        (f"API_KEY=x1 [ -w . ] && X=1\n{OPENRLHF} --seed $X", "line 1, `API_KEY=… [ -w . ]` decides what $X is"),
        (
            f"{OPENRLHF}\n{OPENRLHF}",
            "has 2 commands (OpenRLHF's dpo in line 1, OpenRLHF's dpo in line 2). Say which one is meant: --line 2.",
        ),
        (
            f"for x in 1 2; do\n{OPENRLHF}\ndone",
            "2 commands (OpenRLHF's dpo in line 2, OpenRLHF's dpo in line 2). Say which one is meant by the loop",
        ),
        (
            f"if [ -f x ]; then\n{OPENRLHF}\nelse\n{OPENRLHF}\nfi",
            "and line 1, `if [ -f x ]` decides which of them run.",
        ),
        (
            f"L=1\n# no\nif [ $M = lora ]; then L=2; fi\n{OPENRLHF} --learning_rate $L",
            "line 3, `if [ $M = lora ]` decides what $L is, and only bash knows how. Say it: --set M=VALUE.",
        ),
        (f"case $1 in a) A=(--seed 1);; esac\n{OPENRLHF} ${{A[@]}}", "line 1, `case $1 in` decides what $A is"),
        (f"for s in $(seq 3); do {OPENRLHF} --seed $s; done", "line 1, `for s in $(seq 3)` decides what $s is"),
        (
            f"[ -z ${{1:-}} ] && exit 1\n{OPENRLHF}",
            "ends at line 1, before a command of a trainer. If its arguments change",
        ),
        (
            f"read -d '' X <<EOF\n--ref_pretrain $1\nEOF\n{OPENRLHF} $X",
            "ref_pretrain=$1: only bash knows what $1 is. Give the ",
        ),
        (f"{FACTORY}pref_beta: 0.1\npref_beta: 0.5\n", "line 6: pref_beta is given twice. Leave one of them out."),
        (f"mapfile -t X < <(cat x)\n{OPENRLHF} ${{X[@]}}", "line 1, `mapfile -t X` decides what $X is"),
        (f"{OPENRLHF} --seed 1 \\ \n --beta 2", "the command of line 1 ends too early, at a space behind a backslash"),
        (f"source a.sh\n{OPENRLHF} --seed $X", "X has no value in the script, and a.sh, which it takes in, is not"),
        ("trl dpo --config recipe.yaml --learning_rate 1e-6", "--config=recipe.yaml: the rest of the arguments are in"),
        (f"i=0\nwhile [ $i -lt 900 ]; do i=$((i + 1)); done\n{OPENRLHF}", "since its loops take more than 200 rounds."),
        (f"X=1\nunset X\n{OPENRLHF} --seed $X", "seed=$X: X has no value in the script."),
        (f"set -- a\n[ -f x ] && shift\n{OPENRLHF} --seed $1", "seed=$1: only bash knows what $1 is."),
    ],
)
def test_what_cannot_be_known_is_one_message(text: str, said: str) -> None:
    with pytest.raises(ConvertError) as error:
        conversion(text, "dpo" if text.startswith("model") else None, 8)
    assert said in str(error.value)


CHOOSES = f"""if [ $MODE = lora ]; then
{SWIFT_LORA} --lora_rank ${{1:-8}} --learning_rate $LR
else
{SWIFT} --learning_rate 1e-6 --ref_model "$1"
fi
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "MODE=lora", "--set", "LR=1e-3"], {"adapter": "lora", "adapter.rank": 8, "optim.lr": 1e-3}),
        (["--set", "MODE=lora", "--set", "LR=1", "--", "32"], {"adapter.rank": 32}),
        (["--line", "4", "--", "out"], {"optim.lr": 1e-6, "reference.path": "out"}),
        ([], "--line 4."),
        (["--set", "MODE=full"], "ref_model=$1: only bash knows what $1 is. Give the script's arguments behind --: "),
        (["--set", "MODE"], "--set MODE: must be a name, = and a value. For example: --set LR=1e-6."),
    ],
)
def test_a_script_is_read_as_it_is_called(
    words: list[str], said: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("run.sh").write_text(CHOOSES)
    monkeypatch.setattr("sys.argv", ["rlexp.convert", "run.sh", *words])
    found = list[Conversion]()
    monkeypatch.setattr("rlexp.convert.__main__.summarize", found.append)
    answer = main()
    if isinstance(said, str):
        assert (answer, found) == (1, [])
        assert said in capsys.readouterr().err
    else:
        assert said.items() <= values(found[0]).items()


@pytest.mark.parametrize(
    ("script", "reached"),
    [
        (f"{SWIFT} --dataset AI-ModelScope/x#500 --beta 0.3", {"dataset": "AI-ModelScope/x#500", "beta": 0.3}),
        (f"{OPENRLHF} -v --beta 0.5", {"dataset": "org/d", "-v": True, "beta": 0.5}),
        (f"{OPENRLHF} --learning_rate '5e-7';", {"learning_rate": 5e-7}),
        ("ray job submit --address=http://h:1 -- " + OPENRLHF.removeprefix("deepspeed "), {"address": "http://h:1"}),
        (f"{COMMAND} --learning-rate 1e-6", {"learning_rate": 1e-6}),
        (f"accelerate launch --num_processes 4 -m trl.scripts.{COMMAND[4:]}", {"num_processes": 4}),
        (f"python -m {COMMAND}", {"dataset_name": "org/d"}),
        (f"bash -c \"cd /x && {OPENRLHF} --beta 0.5 &>> log\"", {"beta": 0.5}),
        (f"{COMMAND} --reward_weights 0.5 1", {"reward_weights": [0.5, 1]}),
    ],
)  # fmt: skip
def test_arguments_reach_the_rules(script: str, reached: dict[str, object]) -> None:
    given = conversion(script, None, 8).given
    assert {name: given.get(name) for name in reached} == reached


def test_an_example_has_the_arguments_that_its_text_has() -> None:
    """The reader alone, by the words that begin with two dashes."""
    for file in sorted((FILES / "foreign").glob("*.sh")):
        asked, lines = read(file), file.read_text(encoding="utf-8").splitlines()
        text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
        wanted = {word[2:].strip("\"'").partition("=")[0] for word in text.split() if word.startswith("--")} - {""}
        outside = {"overlap", "nodes", "ntasks"}  # of srun, around the quotes
        assert wanted - outside == set(asked.given) | (set(asked.launcher) - {"-m"}), file


def test_the_folder_of_a_script_is_known(tmp_path: Path) -> None:
    script = tmp_path / "a" / "b" / "run.sh"
    script.parent.mkdir(parents=True)
    text = """S="$(dirname "${BASH_SOURCE[0]}")"\nW=$(cd "$S/../.." && pwd)\n"""
    text += """c "$(dirname "$0")" "$W/x" $(pwd) $(cd a;pwd)"""
    (words,) = [each.words for each in commands(text, script)]
    assert words == ["c", str(script.parent), f"{tmp_path}/x", str(tmp_path), "$(cd a;pwd)"]


def test_files_that_are_sourced_are_named_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("LR=5\n")
    script = "c 1\nD=.\nsource env.sh\n[ -f x ] && . $D/more.sh x\nfalse && . no.sh\nfor i in 1 2; do . env.sh; done"
    first, *_, last = commands(f"{script}\nc $LR")
    assert (first.sourced, last.sourced, last.words) == ((), ("env.sh", "./more.sh"), ["c", "$LR"])
