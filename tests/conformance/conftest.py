"""Fixtures of the contract: the models, the servers, and what was played on whom."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest
from contract_engines import make_model
from contract_servers import servers


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """In ``CONFORMANCE_DIR`` if that is given, so that a server can be started on it beforehand."""
    place = os.environ.get("CONFORMANCE_DIR")
    directory = Path(place) if place else tmp_path_factory.mktemp("conformance")
    return make_model(directory / "model")


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tied") / "model", tied=True)


@pytest.fixture(scope="session")
def owner(tmp_path_factory):
    with servers(tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest.fixture(scope="session")
def sync_numbers():
    """Versions never repeat on a server that several rows use."""
    return itertools.count(int(os.environ.get("CONFORMANCE_FIRST_VERSION", "1")))


def pytest_runtest_logreport(report):
    """With ``CONFORMANCE_PROGRESS`` set: what went wrong, as soon as it does."""
    if report.failed and os.environ.get("CONFORMANCE_PROGRESS"):
        lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
        sys.stderr.write("\n".join([f"\n{report.nodeid} {report.duration:.1f} s", *lines[:12], ""]))
