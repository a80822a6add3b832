"""The report: what is drawn, and what a user sees, sorts and opens in headless Chromium."""

import argparse
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import chart, report
from harness.log import comparison_key, read_log

CONFIG = {"type": "config", "name": "x", "metricName": "val_bpb", "bestDirection": "lower"}
EVIL = (
    "$\\frac{$ <script>document.title='owned'</script></script>"
    "<img src=x onerror=\"document.title='owned'\">"
)


def make_row(run, metric, status="discard", **more):
    """A row as the cycle writes it."""
    return {
        "run": run, "commit": f"{run:07x}", "metric": metric, "status": status,
        "metrics": {"num_steps": 100 + run, "peak_memory_mb": 2048.0},
        "description": f"idea {run}", "timestamp": 1795995598854 + run, "segment": 0,
        "confidence": None, "asi": {}, "reason": "within noise", "seconds": 60.0, **more,
    }  # fmt: skip


def make_rows(count):
    """A session: every fifth run is kept, every other fifth fails."""
    rows = [make_row(1, 1.5, "keep", description="baseline", reason="baseline")]
    best = 1.5
    for run in range(2, count + 1):
        status = {0: "keep", 1: "crash"}.get(run % 5, "discard")
        metric = {"keep": best - 0.001, "crash": 0}.get(status, best + 0.0005 * (run % 7))
        metric = round(metric, 6)
        rows.append(make_row(run, metric, status, parent_metric=best, floor=0.002))
        best = min(best, metric or best)
    return rows


@dataclass
class Session:
    """A folder with a log, and its report."""

    root: Path

    def write(self, rows, **how):
        lines = [CONFIG, *rows] if rows else []
        text = "".join(json.dumps(line) + "\n" for line in lines)
        self.root.joinpath("autoresearch.jsonl").write_text(text)
        report.write_report(self.root, read_log(self.root / "autoresearch.jsonl"), **how)

    def add_run_folder(self, row, **files):
        folder = self.root / ".autoresearch" / "runs" / f"{row['run']}-{row['commit']}"
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name.replace("_", ".")).write_text(text)

    @property
    def page(self):
        return (self.root / "report.html").read_text()


@pytest.fixture
def session(tmp_path):
    return Session(tmp_path)


# ---- the layout ----


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (1.31, 1.79, 6, [1.4, 1.5, 1.6, 1.7]),
        (0.0, 10.0, 6, [0, 2, 4, 6, 8, 10]),
        (0.97, 0.98, 5, [0.97, 0.975, 0.98]),  # the step is 0.005: 0.0025 is not round
        (1.0, 1.0, 5, []),
    ],
)
def test_ticks_are_round(low, high, count, expected):
    assert chart.nice_ticks(low, high, count) == pytest.approx(expected)


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 2), (1, 4), (7, 46), (1, 1000)])
def test_ticks_of_runs_are_whole_numbers(first, last):
    ticks = chart.nice_ticks(first, last, 11, whole=True)
    assert 1 <= len(ticks) <= 11
    assert all(tick == int(tick) and first <= tick <= last for tick in ticks)


def boxes_of_labels(scene):
    """The boxes x1, y1, x2, y2 of the texts of kept runs."""
    labels = [shape for shape in scene.shapes if shape.kind == "text" and shape.run]
    return [
        (x, y - chart.FONT, x + chart.text_width(shape.text), y + 3)
        for shape in labels
        for x, y in [shape.points]
    ]


@pytest.mark.parametrize("size", report.SIZES)
@pytest.mark.parametrize("count", [6, 60, 300])
def test_labels_overlap_neither_each_other_nor_kept_points(size, count):
    scene = chart.layout(make_rows(count), *size)
    boxes = boxes_of_labels(scene)
    assert len(boxes) >= 2
    points = [s.points for s in scene.shapes if s.kind == "dot" and s.color == "keep" and s.run]
    boxes += [(x - 3, y - 3, x + 3, y + 3) for x, y in points]
    labels = len(boxes) - len(points)
    for index, box in enumerate(boxes[:labels]):
        assert not any(chart.touches(box, other) for other in boxes[index + 1 :])
        assert box[0] >= 0 and box[2] <= size[0] and box[1] >= 0 and box[3] <= size[1]


def test_every_run_has_a_point_inside_the_picture():
    rows = make_rows(40)
    rows += [make_row(41, 0.1, "checks_failed"), make_row(42, 7.0)]  # far below and far above
    scene = chart.layout(rows, 680, 400)
    points = [shape for shape in scene.shapes if shape.run and shape.kind != "text"]
    assert {shape.run for shape in points} == set(range(1, 43))
    for shape in points:
        x, y = shape.points
        assert 0 < x < 680 and 0 < y < 400
    kinds = {shape.run: shape.kind for shape in points}
    assert kinds[41] == "down" and kinds[42] == "up"


def test_failures_have_a_line_of_their_own():
    scene = chart.layout(make_rows(40), 680, 400)
    crosses = [shape for shape in scene.shapes if shape.kind == "cross" and shape.run]
    others = [shape for shape in scene.shapes if shape.kind == "dot" and shape.run]
    assert len({shape.points[1] for shape in crosses}) == 1
    assert crosses[0].points[1] > max(shape.points[1] for shape in others)


def test_each_run_has_the_band_of_its_own_floor():
    rows = make_rows(4)
    rows[1]["floor"], rows[2]["floor"], rows[3]["floor"] = 0.02, 0.02, 0.005
    scene = chart.layout(rows, 680, 400)
    bands = [s.points for s in scene.shapes if s.kind == "rect" and s.points[2] - s.points[0] > 20]
    heights = [y2 - y1 for _, y1, _, y2 in bands]
    assert len(bands) == 2
    assert heights[0] == pytest.approx(4 * heights[1], rel=0.05)


def test_repeats_and_holdout_scores_are_drawn():
    rows = make_rows(10)
    rows[4] |= {"repeats": [1.498, 1.4995], "holdout_bpb": 1.80}
    rows[9] |= {"holdout_bpb": 1.7995}
    shapes = chart.layout(rows, 680, 400).shapes
    rings = [s for s in shapes if s.kind == "ring" and s.run]
    assert [s.run for s in rings if s.color == "keep"] == [5, 5]
    held = [s for s in rings if s.color == "holdout"]
    kept_point = next(s for s in shapes if s.kind == "dot" and s.color == "keep" and s.run == 5)
    assert held[0].points == kept_point.points  # shifted so that they begin together
    assert [s.run for s in held] == [5, 10]


def test_holdout_sentence_says_how_much_of_the_gain_holds():
    rows = [
        make_row(1, 1.5, "keep", holdout_bpb=1.7),
        make_row(2, 1.4, "keep", holdout_bpb=1.62),
    ]
    notes = report.holdout_notes([report.chart_row(row) for row in rows])
    assert "0.0800 of 0.1000" in notes[0] and "80% of it holds" in notes[0]


def test_no_holdout_sentence_without_two_scores():
    rows = [make_row(1, 1.5, "keep", holdout_bpb=1.7), make_row(2, 1.4, "keep")]
    assert report.holdout_notes([report.chart_row(row) for row in rows]) == []


def test_picture_and_page_have_the_same_colors():
    light = report.PAGE.read_text().partition("@media")[0]
    colors = dict(re.findall(r"--(\w+): (#\w+);", light))
    assert {name: colors[name] for name in chart.COLORS} == chart.COLORS


# ---- the files ----


def test_foreign_rows_are_drawn_without_a_traceback(session):
    rows = make_rows(5)
    rows[1] |= {"metrics": None, "seconds": "12", "floor": "0.1", "repeats": 7, "asi": "text"}
    rows[2] |= {"timestamp": 1e300, "holdout_bpb": [], "parent_metric": {}, "marks": ["x"]}
    rows[2] |= {"data_id": ["x"], "code": {}}
    rows[3] = {"run": 4, "metric": 1.4}
    session.write(rows)
    assert (session.root / "progress.png").read_bytes()[:4] == b"\x89PNG"


def test_repeats_of_a_train_py_are_points_of_its_first_row(tmp_path):
    rows = [
        make_row(1, 1.5, "keep", code="aaa"),
        make_row(2, 1.45, "keep", code="bbb", repeats=[1.44, 1.46]),
        make_row(3, 1.5, code="aaa"),
    ]
    entries = [
        {"id": "x", "code": "aaa", "score": 1.51},
        {"id": "y", "code": "aaa", "score": 1.49},
        {"id": "z", "code": "aaa", "score": 1.9, "disturbed": "a busy machine"},
    ]
    key = comparison_key(rows[0])
    folder = tmp_path / ".autoresearch"
    folder.mkdir()
    lines = [json.dumps(entry | {"comparison": key}) for entry in entries]
    (folder / "scores.jsonl").write_text("\n".join(lines))
    found = report.with_repeats(tmp_path, rows)
    assert [row["repeats"] for row in found] == [[1.51, 1.49], [1.44, 1.46], []]


def test_a_single_run_of_another_budget_does_not_hide_the_session(session):
    rows = [*make_rows(10), CONFIG, make_row(11, 1.2, "keep", segment=1)]
    session.write(rows)
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', session.page).group(1))
    assert len(data["charts"]) == 1
    assert "10 runs" in data["charts"][0]["scenes"][0]["title"]
    assert len(data["runs"]) == 11


def test_tsv_has_a_line_for_each_run(session, capsys):
    session.write([make_row(1, 1.5, "keep"), make_row(2, 0, "crash", description="a\tb\nc")])
    capsys.readouterr()
    report.print_table(read_log(session.root / "autoresearch.jsonl"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("\t") == ["commit", "val_bpb", "memory_gb", "status", "description"]
    assert lines[1].split("\t") == ["0000001", "1.500000", "2.0", "keep", "idea 1"]
    assert lines[2].split("\t") == ["0000002", "", "2.0", "crash", "a b c"]


def test_watch_rewrites_the_report_after_a_run(session, monkeypatch):
    session.write(make_rows(2))
    log = session.root / "autoresearch.jsonl"
    naps = []

    def nap(seconds):
        naps.append(seconds)
        assert '"watch": true' in session.page  # the page then reloads itself
        if len(naps) == 2:
            assert "idea 3" in session.page
            raise KeyboardInterrupt
        assert "idea 3" not in session.page
        log.write_text(log.read_text() + json.dumps(make_row(3, 1.4)) + "\n")

    # Not time.sleep itself: threads that earlier tests left would call it too
    monkeypatch.setattr(report, "time", SimpleNamespace(sleep=nap))
    args = argparse.Namespace(root=session.root, tsv=False, watch=True)
    with pytest.raises(KeyboardInterrupt):
        report.report_command(args)


# ---- in a browser ----


@pytest.fixture(scope="module")
def chrome():
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is in the dev group")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


@dataclass
class View:
    """The report of a session, opened in the browser."""

    chrome: object
    session: Session

    def show(self, rows):
        self.session.write(rows)
        self.chrome.get(f"file://{self.session.root}/report.html")
        self.assert_quiet()
        script = "return performance.getEntriesByType('resource').map(e => e.name)"
        assert self.chrome.execute_script(script) == []  # nothing is loaded from anywhere

    def assert_quiet(self):
        """No script error."""
        log = self.chrome.get_log("browser")
        assert [entry for entry in log if "favicon" not in entry["message"]] == []

    def elements(self, css):
        script = "return [...document.querySelectorAll(arguments[0])]"
        return self.chrome.execute_script(script, css)

    def texts(self, css):
        script = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        return self.chrome.execute_script(script, css)

    def enter(self, css, value):
        script = "const s = document.querySelector(arguments[0]); s.value = arguments[1];"
        self.chrome.execute_script(script + "s.oninput({target: s})", css, value)

    def click_point(self, run):
        """Click in the middle of a run's point, as a user does."""
        from selenium.webdriver import ActionChains

        point = self.elements(f"#charts svg [data-run='{run}']:not(text)")[0]
        self.chrome.execute_script("arguments[0].scrollIntoView({block: 'center'})", point)
        ActionChains(self.chrome).click(point).perform()

    def set_screen(self, width, height, scheme):
        screen = {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})

    def reset_screen(self):
        self.chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.fixture
def view(chrome, session):
    view = View(chrome, session)
    yield view
    view.reset_screen()


@pytest.mark.parametrize("rows", [[], [make_row(1, 0, "crash")]], ids=["no row", "one crash"])
def test_page_without_a_score(view, rows):
    view.show(rows)
    assert view.texts(".note") == ["no scored run yet"]
    assert not view.elements("#charts svg")
    assert view.texts("td.status") == [row["status"] for row in rows]


def test_page_with_one_row(view):
    view.show(make_rows(1))
    assert view.texts("svg text[data-run]") == ["baseline"]
    assert view.texts("td.status") == ["keep"]


def test_a_run_opens_with_its_diff_notes_and_curve(view):
    rows = make_rows(3)
    rows[1]["asi"] = {"hypothesis": "capacity"}
    steps = [json.dumps({"step": n, "elapsed": n / 10, "loss": 9 - n / 50}) for n in range(300)]
    diff = "--- a\n+++ b\n@@ -1 +1 @@\n-WIDTH = 64\n+WIDTH = 96\n"
    steps_text = "\n".join([*steps, '{"elapsed": NaN}', "{half"])
    view.session.add_run_folder(rows[1], train_diff=diff, steps_jsonl=steps_text)
    view.show(rows)
    view.elements("tr.run[data-run='2']")[0].click()
    assert json.loads(view.texts(".asi")[0]) == {"hypothesis": "capacity"}
    assert view.texts(".diff .added") == ["+WIDTH = 96\n"]
    assert view.texts(".diff .removed") == ["-WIDTH = 64\n"]
    assert "9.000 to 3.0" in view.texts(".detail svg text")[0]
    height = view.chrome.execute_script("return document.querySelector('.curve').getBBox().height")
    assert height > 50
    view.chrome.refresh()  # as the page does by itself with --watch
    assert len(view.elements(".detail")) == 1
    view.elements("tr.run[data-run='2']")[0].click()
    assert not view.elements(".detail")
    view.assert_quiet()


def test_text_of_the_log_is_never_markup(view):
    rows = make_rows(3)
    for row in rows:
        row |= {"description": EVIL, "reason": EVIL, "asi": {"hypothesis": EVIL}, "marks": EVIL}
    view.show(rows)
    view.elements("tr.run[data-run='3']")[0].click()
    assert view.texts("td.text") == [EVIL] * 3
    assert view.chrome.title == "autoresearch"
    assert not view.elements("img") and not view.elements("p script")


def test_a_click_on_a_point_opens_its_run_also_when_filtered_out(view):
    view.show(make_rows(20))
    view.enter("input", "idea 12")
    assert len(view.elements("tr.run")) == 1
    view.click_point(10)
    assert "idea 10" in view.texts(".detail")[0]
    view.click_point(11)  # a failure
    assert len(view.elements(".detail")) == 2


@pytest.mark.slow
def test_a_thousand_rows_sort_and_filter(view):
    view.show(make_rows(1000))
    assert len(view.elements("tr.run")) == 1000
    points = view.elements("#charts svg [data-run]:not(text)")
    assert len(points) == 1000
    view.elements("[data-sort=val_bpb]")[0].click()
    scores = view.texts("tr.run td:nth-child(4)")
    numbers = [float(score) for score in scores if score]
    assert len(numbers) == 801 and numbers == sorted(numbers)
    assert scores[801:] == [""] * 199
    view.elements("[data-sort=val_bpb]")[0].click()
    scores = view.texts("tr.run td:nth-child(4)")
    assert [float(score) for score in scores[:801]] == numbers[::-1]
    assert scores[801:] == [""] * 199  # rows without a score come last in both directions
    view.enter("select", "crash")
    assert set(view.texts("td.status")) == {"crash"}
    assert view.texts("#count") == ["199 of 1000"]
    view.enter("input", "IDEA 97")
    assert sorted(view.texts("tr.run td:first-child")) == ["971", "976"]
    view.assert_quiet()


def test_the_table_has_steps_reason_and_floor(view):
    view.show(make_rows(4))
    cells = view.texts("tr.run[data-run='4'] td")
    assert cells[2] == "within noise"
    assert cells[5:7] == ["0.002000", "104"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readable_on_a_phone(view, scheme):
    view.set_screen(360, 740, scheme)
    view.show(make_rows(60))
    view.elements("tr.run")[0].click()
    assert view.chrome.execute_script("return document.documentElement.scrollWidth") <= 360
    smallest = view.chrome.execute_script(
        "return Math.min(...[...document.querySelectorAll('td, dd, dt, svg text')]"
        ".filter(e => e.getClientRects().length)"
        ".map(e => parseFloat(getComputedStyle(e).fontSize)"
        " * (e.getScreenCTM ? e.getScreenCTM().a : 1)))"
    )
    assert smallest >= 11.5
    script = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    ink, paper = (
        sum(map(int, color[4:-1].split(","))) / 765 for color in view.chrome.execute_script(script)
    )
    assert abs(ink - paper) > 0.6
    assert (paper < 0.5) == (scheme == "dark")
