"""Data sets from where users keep them: a task's name, JSON Lines, a ``datasets`` folder, or the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import httpx
import pyarrow as pa
from datasets import Dataset, DatasetDict, load_from_disk

from grpo_lab.errors import ConfigError, DataError
from grpo_lab.tasks.base import Row, Split
from grpo_lab.tasks.registry import TASKS

_HUB_TIMEOUT_S = 10.0
_FILE_SUFFIXES = (".jsonl", ".json", ".ndjson")


def load_dataset_source(spec: str, *, split: Split = "train", count: int = 4096, seed: int = 0) -> Dataset:
    """A data set with a ``prompt`` column of plain strings or of chat messages.

    Args:
        spec: a task's name, a path to a JSON Lines file, a folder written by
            ``Dataset.save_to_disk``, or a data set on the hub. An existing path wins over a hub name.
        split: which split of a task, of a saved ``DatasetDict`` or of a hub data set.
        count: rows to generate of a task; files and folders are taken whole.
        seed: of a task's rows.

    Raises:
        ConfigError: ``spec`` is empty.
        DataError: nothing there, unreadable, without rows or without a usable ``prompt`` column.
    """
    if not spec.strip():
        raise ConfigError("dataset", spec, "a task's name, a path or a hub name")
    if spec in TASKS:
        return Dataset.from_list(TASKS[spec].generate(split, count, seed))
    path = Path(spec).expanduser()
    if path.is_dir():
        dataset = _from_folder(path, split)
    elif path.exists():
        dataset = _from_rows(read_json_lines(path), path)
    elif path.suffix in _FILE_SUFFIXES or spec.startswith((".", "/", "~")):
        raise DataError(f"{spec}: no such file or folder")
    else:
        dataset = _from_hub(spec, split)
    return _checked(dataset, spec)


def read_json_lines(path: Path) -> list[Row]:
    """One JSON object a line; empty lines are skipped. Raises ``DataError`` with file and line."""
    rows: list[Row] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{path}:{number}: not JSON: {error}") from error
                if not isinstance(row, dict):
                    kind = type(row).__name__
                    raise DataError(
                        f"{path}:{number}: expected a JSON object, found {kind}; one object a line"
                    )
                if "prompt" not in row:
                    columns = ", ".join(row) or "none"
                    raise DataError(f"{path}:{number}: no column 'prompt'; columns found: {columns}")
                rows.append(row)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return rows


def _from_rows(rows: list[Row], path: Path) -> Dataset:
    if not rows:
        raise DataError(f"{path}: no rows")
    columns = dict.fromkeys(name for row in rows for name in row)
    try:
        return Dataset.from_dict({name: [row.get(name) for row in rows] for name in columns})
    except (pa.ArrowException, TypeError, ValueError) as error:  # ArrowInvalid: a column of two types
        raise DataError(f"{path}: rows do not fit into one table: {error}") from error


def _from_folder(path: Path, split: Split) -> Dataset:
    try:
        loaded = load_from_disk(str(path))
    except Exception as error:  # datasets raises many kinds for a damaged folder
        raise DataError(f"{path}: not a folder written by Dataset.save_to_disk: {error}") from error
    return _one_split(loaded, str(path), split)


def _from_hub(name: str, split: Split) -> Dataset:
    nowhere = f"{name!r} is no task ({', '.join(TASKS)}), no file or folder"
    if not datasets.config.HF_HUB_OFFLINE:
        _reach_hub(nowhere)
    try:
        loaded = datasets.load_dataset(name)
    except Exception as error:  # no such name, no permission, a broken builder: all end the same
        raise DataError(
            f"{nowhere}, and could not be loaded from the hub: {type(error).__name__}: {error}"
        ) from error
    return _one_split(loaded, name, split)


def _reach_hub(nowhere: str) -> None:
    """One bounded try: without a network the hub's own retries take half a minute to say so."""
    hub = datasets.config.HF_ENDPOINT
    try:
        httpx.head(hub, timeout=_HUB_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise DataError(
            f"{nowhere}, and the hub at {hub} cannot be reached: {error}; "
            "HF_HUB_OFFLINE=1 uses a copy that was downloaded before"
        ) from error


def _one_split(loaded: Any, spec: str, split: Split) -> Dataset:
    if not isinstance(loaded, DatasetDict):
        return loaded
    if split not in loaded:
        raise DataError(f"{spec}: no split {split!r}; splits found: {', '.join(map(str, loaded))}")
    return loaded[split]


def _checked(dataset: Dataset, spec: str) -> Dataset:
    if "prompt" not in dataset.column_names:
        columns = ", ".join(dataset.column_names) or "none"
        raise DataError(f"{spec}: no column 'prompt'; columns found: {columns}")
    if len(dataset) == 0:
        raise DataError(f"{spec}: no rows")
    for number, prompt in enumerate(dataset["prompt"]):
        if not _is_prompt(prompt):
            raise DataError(
                f"{spec}: row {number}: prompt is {prompt!r:.80}; expected a string that is not empty, or a "
                "list of messages with 'role' and 'content'"
            )
    return dataset


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(m, dict) and m.get("role") and m.get("content") is not None for m in prompt)
    )
