"""Data sets from tasks, files and folders; every refusal names the place and what was found there."""

import json

import pytest
from datasets import Dataset, DatasetDict

from grpo_lab.errors import ConfigError, DataError
from grpo_lab.tasks.sources import load_dataset_source

CHAT = [{"role": "user", "content": "21>"}]


def write_lines(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_a_task_by_name():
    dataset = load_dataset_source("sort_digits", split="heldout", count=7, seed=2)
    assert len(dataset) == 7
    assert set(dataset.column_names) == {"prompt", "answer"}


@pytest.mark.parametrize("prompt", ["21>", CHAT])
def test_json_lines(tmp_path, prompt):
    path = write_lines(tmp_path / "rows.jsonl", {"prompt": prompt, "answer": "12"}, "", {"prompt": prompt})
    dataset = load_dataset_source(path)
    assert len(dataset) == 2
    assert dataset[0] == {"prompt": prompt, "answer": "12"}
    assert dataset[1]["answer"] is None


def test_a_saved_data_set(tmp_path):
    Dataset.from_list([{"prompt": "21>"}]).save_to_disk(tmp_path / "plain")
    assert load_dataset_source(str(tmp_path / "plain"))[0]["prompt"] == "21>"


def test_a_saved_data_set_with_splits(tmp_path):
    folder = tmp_path / "splits"
    DatasetDict(train=Dataset.from_list([{"prompt": "21>"}])).save_to_disk(folder)
    assert len(load_dataset_source(str(folder))) == 1
    with pytest.raises(DataError, match=r"no split 'heldout'; splits found: train"):
        load_dataset_source(str(folder), split="heldout")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"prompt": "1"}', '{"prompt": '], r"rows\.jsonl:2: not JSON"),
        (["[1]"], r"rows\.jsonl:1: expected a JSON object, found list"),
        (
            [{"question": "1", "answer": "2"}],
            r"rows\.jsonl:1: no column 'prompt'; columns found: question, answer",
        ),
        ([{"prompt": 3}], r"rows\.jsonl: row 0: prompt is 3"),
        ([{"prompt": "1"}, {"prompt": ""}], r"rows\.jsonl: row 1: prompt is ''"),
        ([{"prompt": [{"content": "no role"}]}], r"rows\.jsonl: row 0: prompt is"),
        ([{"prompt": "1"}, {"prompt": CHAT}], r"rows\.jsonl: rows do not fit into one table"),
        ([""], r"rows\.jsonl: no rows"),
    ],
)
def test_a_bad_file_is_refused_by_name_and_place(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        load_dataset_source(write_lines(tmp_path / "rows.jsonl", *rows))


def test_bytes_that_are_not_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"rows\.jsonl: cannot be read"):
        load_dataset_source(str(path))


def test_a_folder_that_is_no_data_set(tmp_path):
    with pytest.raises(DataError, match="not a folder written by"):
        load_dataset_source(str(tmp_path))


@pytest.mark.parametrize("spec", ["/nowhere/rows.jsonl", "./nowhere", "rows-that-are-not-here.jsonl"])
def test_a_missing_path(spec):
    with pytest.raises(DataError, match="no such file or folder"):
        load_dataset_source(spec)


def test_a_name_that_is_nothing_lists_the_tasks(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError,
        match=r"'sort_digit' is no task \(sort_digits, running_sum, reverse_digits, distinct_digits\)",
    ):
        load_dataset_source("sort_digit")


def test_a_hub_that_cannot_be_reached_is_told_at_once(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"the hub at http://127\.0\.0\.1:9 cannot be reached"):
        load_dataset_source("org/rows")


def test_an_empty_name():
    with pytest.raises(ConfigError, match="dataset"):
        load_dataset_source(" ")
