"""What would make two runs differ is banned from the code that a simulation runs.

Sets of tasks have an order that depends on addresses, so everything of asyncio that iterates over one
is banned, unless it is sorted on the spot. Protocol code may also not read a clock, draw a random
number or start a thread on its own.
"""

import ast
from pathlib import Path

import pytest

import grpo_lab

ROOT = Path(grpo_lab.__file__).parent
SET_ORDER = {"asyncio.wait", "asyncio.as_completed", "asyncio.all_tasks", "asyncio.TaskGroup"}
OUTSIDE = {
    "time",
    "random",
    "threading",
    "uuid.uuid4",
    "uuid.uuid1",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
}
BANS = {"protocol": SET_ORDER | OUTSIDE, "engine": SET_ORDER, "sim": SET_ORDER}


def banned_uses(source: str, bans: set[str]) -> list[str]:
    """``line: name`` of every import or use of a banned module or name, aliases followed."""
    tree = ast.parse(source)
    meaning: dict[str, str] = {}
    found = []

    def check(node, name):
        parts = name.split(".")
        if any(".".join(parts[: end + 1]) in bans for end in range(len(parts))):
            found.append(f"{node.lineno}: {name}")

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                meaning[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                check(node, alias.name)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                meaning[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                check(node, f"{node.module}.{alias.name}")
    ordered = _sorted_on_the_spot(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in ordered:
            dotted = _dotted(node)
            if dotted:
                head, _, rest = dotted.partition(".")
                if head in meaning:
                    check(node, f"{meaning[head]}.{rest}")
    return sorted(set(found))


def _sorted_on_the_spot(tree: ast.AST) -> set[ast.expr]:
    """The ``f`` of every ``sorted(f(), ...)``."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    sorting = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "sorted"]
    return {call.args[0].func for call in sorting if call.args and isinstance(call.args[0], ast.Call)}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


@pytest.mark.parametrize("package", BANS)
def test_package_is_free_of_banned_uses(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} has no modules: the ban checks nothing"
    found = [
        f"{path.relative_to(ROOT)}:{use}"
        for path in files
        for use in banned_uses(path.read_text(encoding="utf-8"), BANS[package])
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nasyncio.wait(tasks)",
        "import asyncio\nsorted(name(task) for task in asyncio.all_tasks())",
        "import asyncio as aio\naio.as_completed(x)",
        "from asyncio import TaskGroup",
        "from asyncio import all_tasks as tasks",
        "import time",
        "from time import monotonic",
        "import random as r",
        "from threading import Thread",
        "import uuid\nuuid.uuid4()",
        "from uuid import uuid4",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime\ndatetime.now()",
        "from datetime import datetime as d\nd.now()",
        "def f():\n    import time",
    ],
)
def test_the_ban_sees(source):
    assert banned_uses(source, BANS["protocol"])


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nasyncio.wait_for(x, 1)\nasyncio.timeout(1)\nasyncio.gather()",
        "self.time()\nloop.time()\nclock.random",
        "from datetime import timedelta",
        "from grpo_lab.protocol.timeouts import Timeouts",
        "import uuid\nuuid.UUID(int=1)",
        "import asyncio\nsorted(asyncio.all_tasks(), key=str)",
        "wait = 1\nself.wait()\nevent.wait()",
    ],
)
def test_the_ban_does_not_see(source):
    assert banned_uses(source, BANS["protocol"]) == []
