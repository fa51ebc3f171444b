"""One consistent cut beside the files of transformers: weights, optimizer, version, term, prompt cursor.

``grpo_lab_state.json`` is written last, by rename: a checkpoint without it was not finished, and no run
resumes from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from grpo_lab.errors import UserError
from grpo_lab.events import CheckpointSaved
from grpo_lab.types import CursorState

STATE_FILE = "grpo_lab_state.json"
TERM_FILE = "grpo_lab_term"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """``optimizer_step`` counts applied steps; ``cursor`` holds prompts that they consumed, and lost ones.

    ``version`` is the last committed one of ``term``; a run that resumes publishes ``version + 1`` in a
    higher term. ``weights_hash`` is that of the saved parameters.
    """

    term: int
    version: int
    optimizer_step: int
    cursor: CursorState
    weights_hash: str


def save_state(directory: Path, state: CheckpointState) -> None:
    """Marks the checkpoint as complete."""
    text = json.dumps({"format": _FORMAT, **dataclasses.asdict(state)}, indent=2)
    _write_through(directory / STATE_FILE, text + "\n")


def saved_event(directory: Path, state: CheckpointState) -> CheckpointSaved:
    """What the trace says about a checkpoint that is complete."""
    return CheckpointSaved(
        checkpoint=str(directory),
        term=state.term,
        version=state.version,
        optimizer_step=state.optimizer_step,
        prompt_low_water=state.cursor.low_water,
        prompts_done=state.cursor.done,
        weights_hash=state.weights_hash,
    )


def begin_term(output_dir: Path, at_least: int) -> int:
    """The number of the term that begins now: higher than every one begun in this folder before.

    It is kept apart from checkpoints, so that two runs that resume from the same one differ.
    """
    path = output_dir / TERM_FILE
    try:
        before = int(path.read_text(encoding="utf-8")) if path.exists() else 0
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}. Remove it, or choose another output_dir") from error
    term = max(at_least, before + 1)
    output_dir.mkdir(parents=True, exist_ok=True)
    _write_through(path, f"{term}\n")
    return term


def unmark(directory: Path) -> None:
    """Makes an existing checkpoint incomplete before it is written over."""
    (directory / STATE_FILE).unlink(missing_ok=True)


def load_state(directory: Path) -> CheckpointState:
    """The cut of a complete checkpoint.

    Raises:
        UserError: no such folder, an unfinished checkpoint, or a damaged or newer state file.
    """
    if not directory.is_dir():
        raise UserError(f"there is no checkpoint at {directory}")
    path = directory / STATE_FILE
    if not path.exists():
        raise UserError(
            f"{directory} has no {STATE_FILE}: it was not finished, or another trainer wrote it. "
            "Resume from an older checkpoint"
        )
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        if row.pop("format") != _FORMAT:
            raise UserError(f"{path} has another format than {_FORMAT}, which this version reads")
        cursor = row.pop("cursor")
        return CheckpointState(
            **row, cursor=CursorState(int(cursor["low_water"]), tuple(map(int, cursor["done"])))
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {error!r}. Resume from an older checkpoint") from error


def newest_complete(output_dir: Path) -> Path:
    """The complete checkpoint of the newest term with the most steps. Raises ``UserError`` without one."""
    found: list[tuple[int, int, Path]] = []
    for path in output_dir.glob("checkpoint-*"):
        with contextlib.suppress(UserError):  # not finished, or damaged: an older one will do
            state = load_state(path)
            found.append((state.term, state.optimizer_step, path))
    if not found:
        raise UserError(f"there is no complete checkpoint in {output_dir}; start without resuming")
    return max(found)[2]


def _write_through(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def weights_hash(model: nn.Module) -> str:
    """A hash over names, shapes, dtypes and bytes of all parameters, tied ones once.

    On several ranks, every rank must call it when parameters are sharded.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        tensor = tensor.cpu().contiguous()
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
