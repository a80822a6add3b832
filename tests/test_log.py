"""autoresearch.jsonl: strict to write, patient to read."""

import json

import pytest

from harness.log import append_row, comparison_key, current, read_log

CONFIG = {
    "type": "config",
    "name": "x",
    "metricName": "val_bpb",
    "metricUnit": "bpb",
    "bestDirection": "lower",
}
ROW = {"run": 1, "commit": "0123abc", "metric": 0.5, "status": "keep", "description": "theirs"}


def write(path, *lines):
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))


@pytest.fixture
def log(tmp_path):
    return tmp_path / "autoresearch.jsonl"


@pytest.mark.parametrize(
    "odd",
    [
        {"metrics": None},
        {"seconds": "12"},
        {"metrics": {"num_steps": "7", "x": None}},
        {"timestamp": "yesterday"},
        {"asi": []},
        {"description": None, "status": 3, "reason": ["x"]},
        {"budget": "300"},
        {"commit": 12},
    ],
)
def test_a_foreign_row_with_odd_values_becomes_one_with_our_types(log, odd):
    write(log, CONFIG, ROW | odd)
    row = read_log(log)[0]
    for name, kind in (("description", str), ("status", str), ("asi", dict), ("metrics", dict)):
        assert isinstance(row[name], kind)
    assert isinstance(row["seconds"], (int, float)) and isinstance(row["timestamp"], (int, float))
    assert all(isinstance(value, (int, float)) for value in row["metrics"].values())
    assert comparison_key(row) == comparison_key(row)


def test_the_text_of_a_number_counts_as_the_number(log):
    write(log, CONFIG, ROW | {"seconds": "12", "metrics": {"num_steps": "7"}})
    row = read_log(log)[0]
    assert row["seconds"] == 12 and row["metrics"]["num_steps"] == 7


def test_what_is_no_row_is_skipped(log):
    nan = '{"run": 2, "metric": NaN, "status": "keep"}'
    write(log, "a note", CONFIG, "[1]", ROW, nan, {"type": "hook"}, {"run": "x"}, '{"run": 9, "m')
    assert [row["run"] for row in read_log(log)] == [1]


def test_segments_are_counted_from_the_config_lines(log):
    write(log, CONFIG, ROW, ROW | {"run": 2}, CONFIG, ROW | {"run": 3})
    rows = read_log(log)
    assert [row["segment"] for row in rows] == [0, 0, 1]
    assert [row["run"] for row in current(rows)] == [3]
    assert current([]) == []


def test_rows_are_numbered_and_a_segment_begins_with_one_config_line(log):
    append_row(log, dict(ROW))
    append_row(log, dict(ROW))
    append_row(log, dict(ROW), new_segment=True)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line.get("run") for line in lines] == [None, 1, 2, None, 3]
    assert [line.get("segment") for line in lines] == [None, 0, 0, None, 1]


@pytest.mark.parametrize("half", ["", '{"run": 1, "com'])
def test_a_segment_that_has_only_its_config_line_is_continued(log, tmp_path, half):
    log.write_text(json.dumps(CONFIG) + "\n" + half)
    append_row(log, dict(ROW), new_segment=True, torn=tmp_path / "torn")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line.get("run") for line in lines] == [None, 1]
    assert (tmp_path / "torn").exists() == bool(half)


def test_a_last_line_without_its_end_gets_it(log):
    append_row(log, dict(ROW))
    log.write_text(log.read_text().rstrip("\n"))
    append_row(log, dict(ROW))
    assert [row["run"] for row in read_log(log)] == [1, 2]


def test_the_seed_and_the_fixed_files_are_part_of_what_makes_scores_comparable():
    record = {"data_id": "a", "budget": 300, "device": "cpu", "seed": 1, "fixed": "f"}
    assert comparison_key(record) == comparison_key(record | {"budget": 300.0})
    for name in record:
        assert comparison_key(record) != comparison_key(record | {name: "other"})
