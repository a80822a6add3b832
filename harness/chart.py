"""The chart of a session, laid out once for the picture and for the page.

layout() places every line, point and text, in pixels. picture.py paints these shapes with
matplotlib, page.html paints the same shapes as SVG: so the two cannot differ.
"""

import itertools
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from harness.verdict import kept

# Colours of the picture, and of the page in light mode (page.html, tested to be equal).
COLORS = {
    "keep": "#117a4b",
    "discard": "#858b92",
    "crash": "#bf3d0a",
    "checks_failed": "#94690a",
    "holdout": "#3565b5",
    "ink": "#1d1f21",
    "dim": "#6a6f75",
    "grid": "#e4e6e8",
    "band": "#dcefe5",
}
FONT = 12  # pixels; the smallest size that reads well on a phone
CHAR_WIDTH = 0.6  # of the font size: more than the average of common sans-serif fonts
LINE_HEIGHT = 15
LABEL_SPACE = 62  # pixels of width for each text of a kept run; the largest gains come first


@dataclass(frozen=True)
class Shape:
    """One thing to draw. Coordinates are pixels from the left and from the top."""

    kind: str  # line, rect, dot, ring, cross, up, down, text
    color: str  # a key of COLORS
    points: tuple[float, ...]  # x, y; of a rect x1, y1, x2, y2; of a line x, y of every corner
    size: float = 1.0  # line width, radius, or font size
    text: str = ""
    anchor: str = "start"  # of a text: start, middle, end
    run: int = 0  # the run that a click on it opens
    faint: bool = False


@dataclass
class Scene:
    """A laid out chart, in pixels."""

    width: float
    height: float
    title: str
    shapes: list[Shape] = field(default_factory=list)

    def as_json(self) -> dict:
        """The scene for page.html; fields with their default value are left out."""
        defaults = asdict(Shape("", "", ()))
        shapes = [
            {name: value for name, value in asdict(shape).items() if value != defaults[name]}
            for shape in self.shapes
        ]
        return {"width": self.width, "height": self.height, "title": self.title, "shapes": shapes}


def nice_ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """At most `count` round numbers in [low, high]: multiples of 1, 2 or 5 times a power of ten.

    With `whole` they are whole numbers. Empty if the range is, or holds no such number.
    """
    if low == high and whole:
        return [low]
    if not high > low:
        return []
    exponent = math.floor(math.log10((high - low) / count))
    if whole:
        exponent = max(0, exponent)
    for step in (digit * 10.0**power for power in (exponent, exponent + 1) for digit in (1, 2, 5)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < count:
            return [round(index * step, 12) for index in range(first, last + 1)]
    return []


def tick_text(value: float, step: float) -> str:
    """The value with as many decimals as the step between ticks needs."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:.{decimals}f}"


def text_width(text: str, size: float = FONT) -> float:
    """An upper estimate of a text's width in pixels; wide East Asian characters count as one em."""
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return size * (CHAR_WIDTH * (len(text) - wide) + wide)


def clip_text(text: str, length: int) -> str:
    """At most `length` characters on one line."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


class Plot:
    """One segment's chart while it is drawn: scales, shapes, and what a label must not cover."""

    def __init__(self, segment: Sequence[dict], width: float, height: float):
        self.segment = segment
        self.narrow = width < 500
        self.scene = Scene(width, height, "")
        self.first = segment[0]["run"]
        self.last = segment[-1]["run"]
        self.kept = kept(segment)
        scored = [row["metric"] for row in segment if row["metric"] > 0]
        main = [row["metric"] for row in self.kept] or scored
        floor = max((row.get("floor") or 0 for row in segment), default=0)
        room = max(max(main) - min(main), 4 * floor, 0.01 * max(main))
        # Scores far outside of the kept ones become triangles at the edge: they must not press
        # the others flat.
        lowest = max(min(scored), min(main) - 0.8 * room)
        highest = min(max(scored), max(main) + 0.8 * room)
        self.low = min(lowest, min(main) - floor) - 0.06 * room
        self.high = max(highest, max(main) + floor) + 0.06 * room
        # The hold-out text is another text: its scores are shifted so that they begin where the
        # kept ones do, and a gain that holds looks like one.
        self.held = [row for row in self.kept if row.get("holdout_bpb")]
        self.shift = self.held[0]["metric"] - self.held[0]["holdout_bpb"] if self.held else 0.0
        self.shift_text = f", shifted by {self.shift:+.4f}" if self.held else ""
        self.left, self.right = 54.0, width - 14
        self.top, self.bottom = 0.0, height - 44
        self.boxes: list[tuple] = []  # what labels must not touch: x1, y1, x2, y2
        self.dots: list[tuple] = []  # what they should not cover: x, y

    def add(self, kind: str, color: str, *points: float, **more) -> None:
        """Draw one shape."""
        rounded = tuple(round(point, 1) for point in points)
        self.scene.shapes.append(Shape(kind, color, rounded, **more))

    def x(self, run: float) -> float:
        """The place of a run's number."""
        if self.first == self.last:
            return (self.left + self.right) / 2
        span = self.right - self.left - 24
        return self.left + 12 + (run - self.first) / (self.last - self.first) * span

    def y(self, score: float) -> float:
        """The place of a score; those outside of the axis lie on its edge."""
        inside = min(max(score, self.low), self.high)
        return self.bottom - (inside - self.low) / (self.high - self.low) * (self.bottom - self.top)

    def point(
        self, row: dict, score: float, radius: float, color: str, kind: str = "dot", **more
    ) -> None:
        """A score of a run: a dot, or a triangle at the edge of the axis."""
        beyond = "up" if score > self.high else "down" if score < self.low else ""
        x, y = self.x(row["run"]), self.y(score)
        y += {"up": 5, "down": -5, "": 0}[beyond]
        size = 4 if beyond else radius
        self.add(beyond or kind, color, x, y, size=size, run=row["run"], **more)
        self.dots.append((x, y))


def layout(
    segment: Sequence[dict], width: float, height: float, titled: bool = True
) -> Scene | None:
    """The chart of one segment's rows, with or without its title, or None if no row has a score.

    Rows may have `floor` and `parent_metric` (the band within which a gain is noise), `repeats`
    (scores of further runs of the same train.py) and `holdout_bpb`.
    """
    if not any(row["metric"] > 0 for row in segment):
        return None
    plot = Plot(segment, width, height)
    plot.scene.title = headline(segment)
    draw_heading(plot, titled)
    draw_axes(plot)
    draw_bands(plot)
    draw_points(plot)
    draw_kept(plot)
    draw_labels(plot)
    return plot.scene


def headline(segment: Sequence[dict]) -> str:
    """The result of a segment in one line."""
    chosen = [row["metric"] for row in kept(segment)]
    runs = f"{len(segment)} run{'s' * (len(segment) != 1)}"
    if not chosen:
        return f"{runs}, none kept"
    gain = chosen[0] - min(chosen)
    return f"{runs}, {len(chosen)} kept: {min(chosen):.4f}, {gain:.4f} below the baseline"


def draw_heading(plot: Plot, titled: bool) -> None:
    """Title and legend; sets the top of the plot below them."""
    segment = plot.segment
    y = -6.0
    if titled:
        y = 18.0
        plot.add("text", "ink", 4, y, text=plot.scene.title, size=16)
    entries = [("dot", "keep", "kept", True)]
    statuses = {row["status"] for row in segment if row["metric"] > 0}
    scores = [row["metric"] for row in segment if row["metric"] > 0]
    entries += [
        ("dot", "discard", "not kept", "discard" in statuses),
        ("dot", "checks_failed", "checks failed", "checks_failed" in statuses),
        ("cross", "crash", "failed", any(row["metric"] <= 0 for row in segment)),
        ("up", "discard", "off the scale", any(not plot.low <= s <= plot.high for s in scores)),
        ("ring", "discard", "one of several runs", any(row.get("repeats") for row in segment)),
        ("ring", "holdout", f"hold-out text{plot.shift_text}", bool(plot.held)),
        ("rect", "band", "within the noise", any(row.get("floor") for row in segment)),
    ]
    x, y = 10.0, y + 20
    for kind, color, text, present in entries:
        if not present:
            continue
        if x + 12 + text_width(text) > plot.scene.width:
            x, y = 10.0, y + LINE_HEIGHT + 2
        place = (x - 5, y - 9, x + 5, y + 1) if kind == "rect" else (x, y - 4)
        plot.add(kind, color, *place, size=4)
        plot.add("text", "dim", x + 10, y, text=text, size=FONT)
        x += 26 + text_width(text)
    plot.top = y + 34


def draw_axes(plot: Plot) -> None:
    """Grid, round ticks, the names of both axes and the line of the failures."""
    count = max(2, int((plot.bottom - plot.top) // 40))
    ticks = nice_ticks(plot.low, plot.high, count)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else (plot.high - plot.low) / 10
    for tick in ticks:
        plot.add("line", "grid", plot.left, plot.y(tick), plot.right, plot.y(tick))
        text = tick_text(tick, step)
        plot.add("text", "dim", plot.left - 6, plot.y(tick) + 4, text=text, size=FONT, anchor="end")
    plot.add("text", "dim", 4, plot.top - 12, text="val_bpb, lower is better", size=FONT)
    runs = nice_ticks(plot.first, plot.last, 5 if plot.narrow else 11, whole=True)
    for run in runs:
        text = f"{run:.0f}"
        place = plot.x(run), plot.scene.height - 6
        plot.add("text", "dim", *place, text=text, size=FONT, anchor="middle")
    plot.add("text", "dim", 4, plot.scene.height - 6, text="run", size=FONT)
    lane = plot.bottom + 14
    if any(row["metric"] <= 0 for row in plot.segment):
        plot.add("line", "grid", plot.left, lane, plot.right, lane)
        plot.add("text", "dim", plot.left - 6, lane + 4, text="failed", size=FONT, anchor="end")


def draw_bands(plot: Plot) -> None:
    """At each run, around the best score before it: the changes that are within its noise floor."""

    def band_of(row: dict) -> tuple:
        return row.get("parent_metric"), row.get("floor")

    for (parent, floor), rows in itertools.groupby(plot.segment, band_of):
        runs = [row["run"] for row in rows]
        if not parent or not floor:
            continue
        left = max(plot.x(runs[0] - 0.5), plot.left)
        right = min(plot.x(runs[-1] + 0.5), plot.right)
        above = plot.y(parent + floor)
        below = plot.y(parent - floor)
        if below > above:
            plot.add("rect", "band", left, above, right, below)


def draw_points(plot: Plot) -> None:
    """What is not a kept score: discarded runs, failures, repeats."""
    radius = 3.2 if len(plot.segment) < 300 else 2.2
    lane = plot.bottom + 14
    for row in plot.segment:
        for score in row.get("repeats") or []:
            color = "keep" if row["status"] == "keep" else "discard"
            plot.point(row, score, 2.6, color, "ring", faint=True)
    for row in plot.segment:
        if row["metric"] <= 0:
            plot.add("cross", "crash", plot.x(row["run"]), lane, size=4, run=row["run"])
        elif row["status"] != "keep":
            color = "checks_failed" if row["status"] == "checks_failed" else "discard"
            plot.point(row, row["metric"], radius, color)


def draw_kept(plot: Plot) -> None:
    """The staircase of the kept scores, and their scores on the hold-out text."""
    if not plot.kept:
        return
    x, y = plot.x(plot.kept[0]["run"]), plot.y(plot.kept[0]["metric"])
    line = [x, y]
    for row in plot.kept[1:]:
        corner = plot.x(row["run"]), y
        y = plot.y(row["metric"])
        line += [*corner, corner[0], y]
    line += [plot.x(plot.last), y]
    plot.add("line", "keep", *line, size=1.6)
    for x1, y1, x2, y2 in zip(line[::2], line[1::2], line[2::2], line[3::2], strict=False):
        plot.boxes.append((min(x1, x2) - 2, min(y1, y2) - 2, max(x1, x2) + 2, max(y1, y2) + 2))
    shifted = [row["holdout_bpb"] + plot.shift for row in plot.held]
    places = [
        place for row, score in zip(plot.held, shifted, strict=True)
        for place in (plot.x(row["run"]), plot.y(score))
    ]  # fmt: skip
    if len(shifted) > 1:
        plot.add("line", "holdout", *places, size=1, faint=True)
    for row, score in zip(plot.held, shifted, strict=True):
        plot.point(row, score, 3.2, "holdout", "ring")
    for row in plot.kept:
        x, y = plot.x(row["run"]), plot.y(row["metric"])
        plot.add("dot", "keep", x, y, size=4.6 if len(plot.segment) < 300 else 3.2, run=row["run"])
        plot.boxes.append((x - 6, y - 6, x + 6, y + 6))


def draw_labels(plot: Plot) -> None:
    """The descriptions of the kept runs, the largest gains first, where there is room for them."""
    before = [math.inf, *(row["metric"] for row in plot.kept)]
    gains = [score - row["metric"] for score, row in zip(before, plot.kept, strict=False)]
    order = sorted(range(len(gains)), key=lambda index: -gains[index])
    for row in [plot.kept[index] for index in order[: int(plot.scene.width / LABEL_SPACE)]]:
        for length in (24, 14) if plot.narrow else (40, 24, 14):
            if place_label(plot, row, clip_text(row["description"], length)):
                break


def place_label(plot: Plot, row: dict, text: str) -> bool:
    """Draw the text near the point of its run without touching other texts; False without room."""
    x, y = plot.x(row["run"]), plot.y(row["metric"])
    width = text_width(text)
    best_cost, best_place = math.inf, None
    for level in range(7):
        shift = level * (LINE_HEIGHT + 1)
        for left, base in (
            (x + 8, y - 7 - shift), (x - 8 - width, y + 16 + shift), (x + 8, y + 16 + shift),
            (x - 8 - width, y - 7 - shift),
        ):  # fmt: skip
            box = (left - 2, base - FONT, left + width + 2, base + 3)
            if box[0] < plot.left or box[2] > plot.scene.width or box[1] < plot.top - 6:
                continue
            if box[3] > plot.bottom or any(touches(box, other) for other in plot.boxes):
                continue
            covered = sum(box[0] < u < box[2] and box[1] < v < box[3] for u, v in plot.dots)
            cost = level + 2 * covered
            if cost < best_cost:
                best_cost, best_place = cost, (left, base, box, level)
    if best_place is None:
        return False
    left, base, box, level = best_place
    if level:
        end_x = left if left > x else left + width
        plot.add("line", "dim", x, y, end_x, base - 4, size=0.7, faint=True)
    plot.add("text", "ink", left, base, text=text, size=FONT, run=row["run"])
    plot.boxes.append(box)
    return True


def touches(box: tuple, other: tuple) -> bool:
    """Whether two boxes (x1, y1, x2, y2) overlap."""
    return box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
