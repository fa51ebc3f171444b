"""Every row of the contract on every engine; a known difference is checked to be one."""

from __future__ import annotations

import os

import httpx
import pytest
from contract_engines import played_kinds, run_row
from contract_rows import STRICT, read_differences, read_rows, read_strict
from contract_steps import STRETCHES, Player, TooLate

IN_PROCESS = ("sim", STRICT)


def wanted(kind, row):
    """``make test`` plays all rows in virtual time, the core ones on a server. Else: all."""
    return "CONFORMANCE_ENGINES" in os.environ or kind in IN_PROCESS or row.core


ROWS = [row for row in read_rows() if row.core or os.environ.get("CONFORMANCE_ROWS") != "core"]
KNOWN = (*read_differences(), *read_strict())
DIFFERENCES = {(item.row, kind): item for item in KNOWN for kind in item.engines}
CASES = [(kind, row) for kind in played_kinds() for row in ROWS if kind in row.only and wanted(kind, row)]


async def clean_up(player, row):
    """A server that is in this process is new for each row; the others serve the next one."""
    if row.server == "main":
        await (player.restore() if row.dirty else player.settle())
    elif row.server == "stock":
        await (player.restore_stock() if row.dirty else player.settle())


def play(kind, row, model, owner, numbers):
    """Once more with longer generations if one may have ended before the row could pause it."""
    for stretch in STRETCHES:
        try:
            play_once(kind, row, model, owner, lambda target, s=stretch: Player(target, numbers, s))
        except TooLate:
            if kind in IN_PROCESS or stretch == STRETCHES[-1]:
                raise
        else:
            return


def play_once(kind, row, model, owner, player_on):
    async def on(target):
        player = player_on(target)
        try:
            await player.play(row)
        finally:
            await player.close()
            if kind not in IN_PROCESS:
                await clean_up(player, row)

    try:
        run_row(kind, row.server, model, owner, on)
    finally:
        if row.server == "doomed" and kind not in IN_PROCESS:
            owner.drop(kind, row.server, model.directory)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("kind", "row"), CASES, ids=[f"{kind}-{row.id}" for kind, row in CASES])
def test_row(kind, row, model, tied_model, owner, sync_numbers):
    model = tied_model if row.tied else model
    known = DIFFERENCES.get((row.id, kind))
    if known is None:
        play(kind, row, model, owner, sync_numbers)
        return
    with pytest.raises((AssertionError, httpx.RemoteProtocolError), match=known.says):
        play(kind, row, model, owner, sync_numbers)


def test_the_tables_of_differences_name_rows_and_say_why():
    ids = {row.id for row in read_rows()}
    for item in KNOWN:
        assert item.row in ids
        assert len(item.reason) > 20
        assert item.says
