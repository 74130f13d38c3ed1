"""The report page as text: numbers are in it as they are, and so is the plotting library's licence."""

from __future__ import annotations

import base64
import math
import re
from dataclasses import replace

import numpy as np

from rlexp.compare.page import MetricCurves, render
from tests.helpers.report_pages import ring_sizes


def test_numbers_survive_the_way_into_the_page() -> None:
    """A value that float32 rounds to zero is not shown as equal to the bit. One that is not finite breaks no JSON."""
    payload = ring_sizes()
    steps = np.array([1, 2, 3])
    tiny = MetricCurves("m", True, 3, steps, [np.array([1e-300, math.nan, math.inf])] * 4, [None] * 4)
    text = render(replace(payload, metrics=[tiny], runs=[replace(run, efficiency=math.nan) for run in payload.runs]))
    assert '"efficiency":null' in text
    assert "NaN" not in text.partition("report-head")[2].partition("</script>")[0]
    data = base64.b64decode(text.partition('id="metric-0">')[2].partition("<")[0])
    assert np.frombuffer(data[:12], "<i4").tolist() == [1, 2, 3]
    assert np.frombuffer(data[12:24], "<f4")[0] > 0


def test_the_licence_of_the_plotting_library_is_in_the_page() -> None:
    text = render(ring_sizes())
    assert "The MIT License (MIT)" in text
    assert "Copyright (c) 2022 Leon Sorokin" in text
    assert not addresses(text) - {"https://github.com/leeoniya/uPlot", "http://www.w3.org/2000/svg"}


def addresses(text: str) -> set[str]:
    return set(re.findall(r"https?://[\w./-]+", text))
