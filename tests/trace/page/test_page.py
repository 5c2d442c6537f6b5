"""The page of a report stands alone, is small, and shows all that it was given."""

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from penstock.schedules import Forward
from penstock.trace.page import Page, Step, render_page, with_step
from penstock.trace.page.charts import curves, curves_of_runs, held_bytes, memory_chart
from penstock.trace.page.lane_chart import MOST_BOXES, MOST_LANES, lanes_of
from penstock.trace.page.page import MEANINGS
from penstock.trace.timeline import MemoryKind, MemorySample, Span, Timeline
from penstock.trace.units import time_text
from tests.trace.page.pages import WICKED, full_page, large_step, timeline

LIMIT_BYTES = 8_000_000
VOID = {"meta", "br", "link", "img", "hr", "input"}


class Reader(HTMLParser):
    """Collects what a page is made of; refuses elements that are closed in another order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str | None]] = []
        self.titles: list[str] = []
        self.text: list[str] = []
        self.data = ""
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self._open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag == "h2":
            self.titles.append(data)
        if attributes.get("id") == "figures":
            self.data += data
        if tag not in ("script", "style"):
            self.text.append(data)


def rendered(**step: Any) -> str:
    return render_page(with_step(Page("x"), Step(**step)))


@pytest.fixture(scope="module")
def page() -> str:
    return render_page(full_page())


@pytest.fixture(scope="module")
def read(page: str) -> Reader:
    return Reader(page)


def test_every_part_has_its_section(read: Reader) -> None:
    expected = ["Timeline", "Where the time goes", "Memory", "Curves", f"Plan {WICKED}", "Recipe"]
    assert read.titles == expected


def test_nothing_is_taken_from_outside(page: str, read: Reader) -> None:
    places = {
        value for name, value in read.attributes if name in ("src", "href", "action", "data")
    }
    assert places and all(str(place).startswith("#") for place in places)
    assert "default-src 'none'" in page and "@import" not in page and "url(" not in page[:9_000]


def test_a_page_is_small(page: str) -> None:
    assert len(page.encode()) < LIMIT_BYTES


def test_names_from_outside_are_shown_and_never_run(page: str, read: Reader) -> None:
    assert WICKED not in page
    assert "onclick" not in {name for name, _ in read.attributes}
    assert sum(WICKED in text for text in read.text) >= 8
    assert json.loads(read.data)["timeline"]["data"]
    assert "<" not in read.data


def test_names_in_charts_are_no_markup_either(read: Reader) -> None:
    names = [trace["name"] for chart in json.loads(read.data).values() for trace in chart["data"]]
    wicked = [name for name in names if unescape(name) == WICKED]
    assert wicked and not any("<" in name for name in names)


def test_predicted_stands_above_measured_on_one_axis_of_time(read: Reader) -> None:
    layout = json.loads(read.data)["timeline"]["layout"]
    above, below = layout["yaxis1"]["domain"], layout["yaxis2"]["domain"]
    assert above[0] > below[1] and "xaxis2" not in layout
    assert [note["text"].split("</b>")[0] for note in layout["annotations"]] == [
        "<b>predicted",
        "<b>measured",
    ]


def test_a_box_says_what_it_is_and_a_message_how_many_bytes() -> None:
    step = timeline()
    sends = [n for n, span in enumerate(step.spans) if "SendA" in type(span.instruction).__name__]
    spans = list(step.spans)
    first = spans[sends[0]]
    spans[sends[0]] = first._replace(end_s=first.end_s + 0.002, num_bytes=2_048)
    read = Reader(rendered(measured=replace(step, spans=tuple(spans))))
    charts = json.loads(read.data)
    hovers = [text for trace in charts["timeline"]["data"] for text in trace["customdata"]]
    assert ", stage 0, micro-batch 0<br>rank 0, 10 ms from 0" in hovers
    assert any("micro-batch 0" in text and text.endswith("2 KiB") for text in hovers)


def test_messages_are_arrows_from_their_send_to_their_arrival() -> None:
    step = timeline(2, 3)
    (arrows,) = (
        trace
        for trace in json.loads(Reader(rendered(measured=step)).data)["timeline"]["data"]
        if trace["name"] == "messages"
    )
    sends = [span for span in step.spans if "Send" in type(span.instruction).__name__]
    starts = {round(1_000 * float(span.start_s), 3) for span in sends}
    assert {round(x, 3) for x in arrows["x"][::3]} == starts
    ends = zip(arrows["x"][::3], arrows["x"][1::3], strict=True)
    assert all(end > start for start, end in ends)
    down = [n for n in range(0, len(arrows["y"]), 3) if arrows["y"][n] < arrows["y"][n + 1]]
    assert len(down) == 3 and len(arrows["y"]) == 2 * 3 * 3
    first = ", activation of micro-batch 0<br>rank 0 to rank 1, 1 ms after its send began"
    assert arrows["customdata"].count(first) == 3


def test_a_timeline_has_words_for_people_who_cannot_see_it() -> None:
    text = rendered(measured=timeline(2, 3))
    label = r'aria-label="Timeline, measured: step [\d.]+ ms, bubble [\d.]+%, 2 ranks'
    assert re.search(label, text)


def test_words_of_the_field_are_explained_where_they_stand() -> None:
    text = rendered(measured=timeline(2, 3))
    meaning = MEANINGS["bubble"].replace("'", "&#39;")
    assert text.count(f'<abbr title="{meaning}">bubble</abbr>') == 2  # a figure, and a column


def test_measured_memory_is_drawn_at_the_times_of_the_timed_step() -> None:
    timed = timeline(2, 3)
    slower = Timeline(
        tuple(s._replace(start_s=3 * s.start_s, end_s=3 * s.end_s) for s in timed.spans),
        tuple(replace(m, time_s=3 * m.time_s) for m in timed.memory),
    )
    charts = json.loads(Reader(rendered(measured=replace(timed, memory=()), memory=slower)).data)
    axis = charts["timeline"]["layout"]["xaxis"]["range"]
    assert charts["memory-measured"]["layout"]["xaxis"]["range"] == axis
    assert max(x for t in charts["memory-measured"]["data"] for x in t["x"]) <= axis[1]


def test_memory_of_other_instructions_says_that_its_axis_is_another() -> None:
    text = rendered(measured=replace(timeline(2, 3), memory=()), memory=timeline(2, 4))
    assert "of another step than the timeline" in text


def test_a_limit_far_above_the_peak_does_not_hide_the_memory() -> None:
    step = timeline(2, 2)
    far = memory_chart(step, (2**34,) * 2)
    assert far.layout["yaxis1"]["range"][1] == pytest.approx(1.08 * 7)
    assert not far.layout["shapes"] and "lies far above" in far.note
    assert "7 MiB, 0.04% of 16 GiB" in far.layout["annotations"][0]["text"]
    near = memory_chart(step, (8 << 20,) * 2)
    assert len(near.layout["shapes"]) == 2 and not near.note


def test_runs_have_a_curve_each_on_one_chart() -> None:
    ours = [{"step": 1, "loss": 2.0, "own": 1}, {"step": 2, "loss": 1.0}]
    charts = list(curves_of_runs({"a<b": ours, "c": [{"step": 1, "loss": 3.0}]}))
    assert [chart.title for chart in charts] == ["loss, of a step", "own"]
    assert [trace["name"] for trace in charts[0].data] == ["a&lt;b", "c"]
    assert [trace["y"] for trace in charts[0].data] == [[2, 1], [3]]


def test_an_empty_page_is_a_page() -> None:
    assert Reader(render_page(Page(title="nothing yet"))).titles == []


def test_a_timeline_of_no_length_is_left_out() -> None:
    step = timeline(1, 1)
    flat = Timeline(tuple(span._replace(start_s=0, end_s=0) for span in step.spans))
    assert Reader(rendered(predicted=flat)).titles == []


def test_a_predicted_step_is_one_number_everywhere_with_its_optimizer() -> None:
    step = timeline()
    text = time_text(float(step.step_s) * 2)
    read = Reader(rendered(predicted=step, optimizer_s=float(step.step_s)))
    assert text in read.text
    headline = json.loads(read.data)["timeline"]["layout"]["annotations"][0]["text"]
    assert f"step {text}, " in headline


def test_of_too_many_spans_the_longest_are_drawn() -> None:
    long = [Span(0, Forward(0, n), 2.0 * n, 2.0 * n + 1) for n in range(20)]
    short = [Span(0, Forward(0, n), 1.5 + 1e-4 * n, 1.5 + 1e-4 * (n + 1)) for n in range(10_000)]
    drawn = lanes_of(Timeline((*long, *short)))
    assert len(drawn.boxes) == MOST_BOXES
    assert {box.span for box in drawn.boxes} >= set(long)
    assert drawn.left_out == "the 9,000 longest of 10,020 spans are drawn"


@pytest.fixture(scope="module")
def large() -> Reader:
    step = large_step()
    assert len(step.spans) > 100_000
    page = rendered(measured=step)
    assert len(page.encode()) < LIMIT_BYTES
    return Reader(page)


@pytest.mark.slow
def test_a_thousand_ranks_fit_and_what_is_left_out_is_said(large: Reader) -> None:
    said = " ".join(large.text)
    assert f"{MOST_LANES} of 1,000 ranks are drawn, evenly chosen" in said
    assert "64 of 1,000 ranks are drawn, evenly chosen." in said


@pytest.mark.slow
def test_every_lane_that_is_drawn_has_its_boxes(large: Reader) -> None:
    chart = json.loads(large.data)["timeline"]
    drawn = {(trace["yaxis"], lane) for trace in chart["data"] for lane in trace["y"]}
    assert drawn == {("y1", lane) for lane in range(MOST_LANES)}
    assert sum(len(trace["y"]) for trace in chart["data"]) <= MOST_BOXES


def test_memory_of_a_ranks_stages_adds_up_kind_by_kind() -> None:
    step = timeline(2, 2)
    both = replace(step, spans=tuple(span._replace(rank=0) for span in step.spans))
    held = held_bytes(both)[0].num_bytes
    assert held[MemoryKind.WEIGHTS][-1] == 8 << 20
    assert max(held[MemoryKind.ACTIVATIONS]) == 6 << 20


def test_thinned_memory_keeps_its_peak_and_says_so() -> None:
    step = timeline(1, 1)
    sizes = [n % 7 for n in range(100_000)]
    sizes[54_321] = 1 << 30
    kind = MemoryKind.ACTIVATIONS
    memory = [MemorySample(0, n * 1e-7, size, kind) for n, size in enumerate(sizes)]
    figure = memory_chart(replace(step, memory=tuple(memory)), (2 << 30,))
    (trace,) = figure.data
    assert max(trace["y"]) == 1 and len(trace["y"]) < 50_000
    assert "at most 40,000 points are drawn" in figure.note
    assert [shape["y0"] for shape in figure.layout["shapes"]] == [2]


def test_each_number_has_a_curve_and_losses_share_one() -> None:
    lines: list[dict[str, Any]] = [{"step": n, "loss": 1.0, "lr": 0.1} for n in range(7_000)]
    lines.append({"step": 7_000, "train_loss": 2.0, "note": "text", "is_last": True})
    found = {figure.title: figure for figure in curves(lines)}
    assert list(found) == ["loss", "lr"]
    assert [len(trace["y"]) for trace in found["loss"].data] == [2_334, 1]
    assert found["lr"].data[0]["x"][-1] == 6_999
    assert found["lr"].note == "Of 7,000 points, one in 3 is drawn."


def test_the_code_in_the_guide_makes_a_page(tmp_path, monkeypatch) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "report.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", guide, re.DOTALL))
    exec(compile(code, "report.md", "exec"), {})
    assert (
        Reader((tmp_path / "predicted.html").read_text(encoding="utf-8")).titles[0] == "Timeline"
    )
    assert timeline().from_json((tmp_path / "predicted.json").read_text()).num_ranks == 2
