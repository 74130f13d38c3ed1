"""The table of what has run where is what the measured pages say."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import where
from bench.kept_rows import slug
from tests.helpers.paths import ROOT

MEASURED = ROOT / "docs" / "measured"


def test_the_page_has_the_table_of_the_measured_pages() -> None:
    page = (ROOT / "docs" / where.PAGE).read_text(encoding="utf-8")
    _, _, rest = page.partition(where.BEGIN)
    assert rest.partition(where.END)[0].strip() == where.table()


def test_every_section_that_a_gpu_has_run_is_in_a_row() -> None:
    named = {section for row in where.ROWS for section in row.sections}
    for page in MEASURED.glob("*.md"):
        for line in page.read_text(encoding="utf-8").splitlines():
            section = f"{page.name}#{slug(line)}"
            if line.startswith("## ") and any(place.startswith("one ") for place in where.said(section, MEASURED)):
                assert section in named or page.name == "beside_trl.md", section


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Measured 2026-11-25 at 4360d86, on 1 × NVIDIA H100 80GB HBM3, sm_90", ("one H100", "2026-11-25")),
        ("On one H200 (2026-11-27, torch 2.11), 25 of 26 passed.", ("one H200", "2026-11-27")),
        ("Measured 2026-12-01 at commit 0, on 8 × NVIDIA H100 80GB HBM3, sm_90", ("several GPUs", "2026-12-01")),
        ("Not run on a GPU. Rehearsed on four CPU ranks 2026-11-27 at commit 1", ("CPU", "2026-11-27")),
        ("Measured 2026-11-22 at commit 4e, on AMD EPYC, 2 cores, 0 GPUs; torch 2.13.0", ("CPU", "2026-11-22")),
        ("Predicted 2026-11-27 at commit 0b, on a CPU, for 8 H100", ("predicted", "2026-11-27")),
        ("Measured on 1 × NVIDIA H100.", None),
        ("Until 2026-11-27 the program read it otherwise.", None),
    ],
)
def test_a_paragraph_says_its_machine_and_its_date(text: str, said: tuple[str, str] | None) -> None:
    assert where.where(text) == said


def test_a_measurement_moves_the_table(tmp_path: Path) -> None:
    """Also where a section was measured twice, and where another one with the same words follows."""
    (tmp_path / "gpu.md").write_text(
        "## Rings\n\n<!-- rings: begin -->\n**Not run on a GPU.** Rehearsed 2026-11-27 at commit 1.\n\n"
        "### Of four\nMeasured 2026-12-02 at commit 2, on 4 × NVIDIA H100 80GB HBM3.\n<!-- rings: end -->\n\n"
        "## Rates\n\nMeasured 2026-12-05 at commit 2, on 1 × NVIDIA B200.\n"
    )
    made = where.table(tmp_path, [
        where.Row("rings", ("gpu.md#rings",), on_cpu=where.REHEARSED),
        where.Row("rates", ("gpu.md#rates",), cells=(("one B200", "{}: 2 of 3"),)),
    ])  # fmt: skip
    assert made.splitlines()[0] == "| what | CPU | one B200 | one H100 | one H200 | several GPUs |"
    assert made.splitlines()[2:] == [
        "| [rings](measured/gpu.md#rings) | rehearsed 2026-11-27 |  |  |  | 2026-12-02 |",
        "| [rates](measured/gpu.md#rates) | – | 2026-12-05: 2 of 3 |  |  |  |",
    ]
    with pytest.raises(SystemExit, match=r"has no section ring\. Correct ROWS in bench/where\.py\."):
        where.table(tmp_path, [where.Row("rings", ("gpu.md#ring",))])
