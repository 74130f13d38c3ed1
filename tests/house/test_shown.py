"""Output that a page shows is what its command prints, and an experiment that a page shows trains on the page's rows.

A page marks output by a comment on the line before its block, `<!-- output of: python -m rlexp … -->`. Commands that
prepare it stand before it, with && between. A line of three dots leaves lines out, and what varies from run to run is
not compared (`tests/helpers/pages.py` lists it). Commands run in a folder as a reader's is: a checkout, with the files
that the pages have a reader write.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.pages import DEAR, MAKE_RUN, PAGES, Shown, files, not_printed, outputs, rows_of, typed
from tests.helpers.paths import ROOT
from tests.helpers.wandb_runs import CLEAN

SHOWN = [shown for page in PAGES for shown in outputs(page)]
EXPERIMENTS = [(page, Path(name).stem) for page in PAGES for name in files(page) if name.startswith("conf/experiment/")]
SLOW = pytest.mark.slow
ON_CPU = ("model=tiny", "launch.device=cpu", "logger=none", "train.max_steps=2", "hydra.run.dir=run")


class Readers:
    """Folders in which a reader types: a checkout, with the files of a page. Pages without files share one, and with it
    the output of their commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed: dict[tuple[Path, str], tuple[int, str]] = {}

    def of(self, page: Path) -> Path:
        own = files(page) | rows_of(page)
        folder = self.folder / (page.stem if own else "any")
        if not folder.exists():
            (folder / "conf" / "experiment").mkdir(parents=True)
            (folder / "tests").symlink_to(ROOT / "tests")
            for file in (ROOT / "conf" / "experiment").glob("*.json*"):  # rows; rlexp finds its experiments itself
                (folder / "conf" / "experiment" / file.name).symlink_to(file)
            write(folder, page)
        return folder

    def prints(self, shown: Shown) -> str:
        """Run the commands of a block that have not run yet, and return what the last one prints."""
        folder, chain = self.of(shown.page), ""
        for module, *words in shown.commands:
            chain = f"{chain} && {module} {' '.join(words)}"  # the same command after another one is another
            if (folder, chain) not in self.printed:
                done = warm.run(module, words, folder, env={**CLEAN, "RLEXP_CUT": "auto"}, timeout=1700)
                self.printed[folder, chain] = done.returncode, f"{done.stdout}\n{done.stderr}"
        code, text = self.printed[folder, chain]
        assert code == shown.code, f"{shown.page.name}: {chain}: exit code {code}: {text}"
        return text


def write(folder: Path, page: Path) -> None:
    for name, text in (files(page) | rows_of(page)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@pytest.fixture(scope="session")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Readers:
    return Readers(tmp_path_factory.mktemp("reader"))


@pytest.mark.parametrize(
    "shown",
    [pytest.param(each, id=f"{each.page.stem}-{number}", marks=SLOW if each.slow else ())
     for number, each in enumerate(SHOWN)],
)  # fmt: skip
@pytest.mark.timeout(1800)  # a real model trains on two cores
def test_output_on_a_page_is_the_program_s(shown: Shown, readers: Readers) -> None:
    first = shown.text.partition("\n")[0]
    assert not first.startswith("$ ") or first == f"$ {shown.command.rpartition(' && ')[2]}"
    wrong = not_printed(shown.text, readers.prints(shown))
    assert wrong is None, f"{shown.page.name}: {shown.command} does not print: {wrong}"


def test_the_readme_shows_what_make_run_prints() -> None:
    assert MAKE_RUN in [each.command for each in outputs(ROOT / "README.md")]
    assert any(not each.slow for each in SHOWN)


@pytest.mark.parametrize(("page", "name"), [
    pytest.param(page, name, id=f"{page.stem}-{name}", marks=SLOW if number else ())
    for number, (page, name) in enumerate(EXPERIMENTS)
])  # fmt: skip
def test_an_experiment_of_a_page_trains_on_the_rows_of_the_page(page: Path, name: str, tmp_path: Path) -> None:
    write(tmp_path, page)
    done = warm.run("rlexp", [f"+experiment={name}", *ON_CPU], tmp_path, env=CLEAN)
    assert done.returncode == 0, f"{page.name}: conf/experiment/{name}.yaml: {done.stderr}"
    assert (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 2


# ---- what is planted is found ----

PRINTED = """rlexp 0.1.0  dpo on tiny (120,000 parameters, fp32), engine zero1
  ring of 8 (zigzag direct, cpu_flash) × 1 replica = 8 ranks on cpu
  240 pairs, 30 steps (an epoch has 30)
step 3 of 30: loss 0.6931, 1,234 tok/s
  loss                             6.0e-15  1.0e-12
done: /home/somebody/rlexp/runs/2026-11-21_06-00-00_dpo_ring8  (curve in metrics.jsonl)
(78 s)
"""


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        (PRINTED, None),
        ("$ python -m rlexp\n" + PRINTED, None),
        ("rlexp 0.2.0  dpo on tiny (120,000 parameters, fp32), engine zero1\n...\n(15 s)", None),
        ("...\n  240 pairs, 30 steps (an epoch has 30)\nstep 3 of 30: loss 0.6931, 98 tok/s", None),
        ("done: /tmp/x/runs/2030-01-01_00-00-00_dpo_ring8  (curve\n in metrics.jsonl)", None),
        ("loss 7.1e-16 2.0e-12", None),
        ("loss 7.1e-07 1.0e-12", "N32"),
        ("loss 7.1e-16 1.0e+12", "LARGE"),
        ("engine zero2", "zero2"),
        ("ranks on cpu\nstep 3 of 30", "ranks on cpu step"),  # a line between is left out without dots
        ("240 pairs, 30 steps\n...\nrlexp 0.1.0  dpo on tiny", "rlexp VERSION"),  # another order
        ("step 3 of 30: loss 0.6930", "0.6930"),
        ("240 pairs, 31 steps", "31"),
    ],
)
def test_what_was_not_printed_is_found(shown: str, missing: str | None) -> None:
    found = not_printed(shown, PRINTED)
    assert (found is None) == (missing is None)
    assert missing is None or missing in str(found)


def test_marked_blocks_are_read_with_their_commands(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    two = "python -m rlexp x=1 && python -m rlexp.generate run --rows 1"
    page.write_text("<!-- output of: make run -->\n```\na\n```\n\n"
                    f"<!-- output of: {two}, which exits with 1 -->\n\n```text\nb\n```\n\n"
                    "```\nno output\n```\n", encoding="utf-8")  # fmt: skip
    one, other = outputs(page)
    assert (one.text, other.text, one.slow, one.code, other.code) == ("a\n", "b\n", True, 0, 1)
    assert one.commands == [["rlexp", "parallel=ring8", "launch.device=cpu"]]
    assert other.commands == [["rlexp", "x=1"], ["rlexp.generate", "run", "--rows", "1"]]
    assert Shown(page, f"python -m {DEAR[2]}", 0, "").slow
    with pytest.raises(AssertionError, match="must begin with"):
        typed("ls")


OWN_PAGE = """# A page

```bash
cat > pairs.jsonl <<'ROWS'
{"prompt": "a", "chosen": "b", "rejected": "c"}
{"prompt": "d", "chosen": "e", "rejected": "f"}
ROWS
```

<!-- output of: python -m rlexp.data data=jsonl data.path=pairs.jsonl train.batch_size=2 launch.device=cpu \
--samples 0 -->
```
Sources
  data: pairs.jsonl
    pairs: `prompt`, `chosen`, `rejected`
    2 rows read, 2 kept (100 %), 10 tokens
...
loss=dpo trains on 2 pairs an epoch: 1 step of 2, and 1 step in this run (1 epoch).
```

<!-- output of: python -m rlexp data=jsonl data.path=pairs.jsonl train.batch_size=2 launch.device=cpu hydra.run.dir=r \
&& python -m rlexp.generate r --prompt "Who are you?" rollout.max_new_tokens=4 launch.device=cpu -->
```
$ python -m rlexp.generate r --prompt "Who are you?" rollout.max_new_tokens=4 launch.device=cpu
rlexp 9.9.9  answers of r, beside its start, fp32
...
  trained
```
"""


def test_commands_run_in_the_folder_of_the_page_in_turn(tmp_path: Path) -> None:
    """The preview and the answers of a page, as its reader gets them; a block with another number is found."""
    page = tmp_path / "page.md"
    page.write_text(OWN_PAGE, encoding="utf-8")
    readers, (preview, answers) = Readers(tmp_path / "readers"), outputs(page)
    for shown in (preview, answers):
        assert not_printed(shown.text, readers.prints(shown)) is None
    with pytest.raises(AssertionError, match="exit code 0"):
        readers.prints(dataclasses.replace(preview, code=1))
    assert "3 rows" in str(not_printed(preview.text.replace("2 rows", "3 rows"), readers.prints(preview)))
