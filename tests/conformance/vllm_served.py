"""What a server serves, to be compared with what another one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx

from grpo_lab.harness.vllm_server import DEFAULT_PYTHON, VllmServerConfig

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON = REPOSITORY / DEFAULT_PYTHON
PROMPTS = [[3 + (7 * i + 5 * k) % 15 for k in range(3 + i)] for i in range(12)]
GREEDY_TOKENS = 24


@dataclass(frozen=True)
class Served:
    """Checksums by parameter, and greedy tokens with their logprobs by prompt."""

    checksums: dict[str, str]
    tokens: list[list[int]]
    logprobs: list[list[float]]


def served_by(url: str) -> Served:
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        checksums = client.post("/weight_checker", json={"action": "checksum"})
        assert checksums.status_code == 200, checksums.text
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "temperature": 0, "max_tokens": GREEDY_TOKENS, "ignore_eos": True}
        answers = [
            client.post(
                "/v1/completions", json={**body, "prompt": ids, "logprobs": 0, "return_token_ids": True}
            )
            for ids in PROMPTS
        ]
    choices = [answer.json()["choices"][0] for answer in answers]
    return Served(
        checksums.json()["checksums"],
        [choice["token_ids"] for choice in choices],
        [choice["logprobs"]["token_logprobs"] for choice in choices],
    )


def largest_gap(left: Served, right: Served) -> float:
    """max |logprob - logprob| over the same greedy tokens."""
    assert left.tokens == right.tokens
    pairs = zip(left.logprobs, right.logprobs, strict=True)
    return max(abs(a - b) for rows in pairs for a, b in zip(*rows, strict=True))


def config_for(model: Path, log: Path, **changes) -> VllmServerConfig:
    return VllmServerConfig(model, log, python=PYTHON, **{"max_num_seqs": 32, **changes})


def grpo_lab_run(out: Path, *options: str, timeout_s: float = 1800) -> tuple[int, str, dict]:
    """Exit code, output and summary of a run."""
    done = subprocess.run(
        [sys.executable, "-m", "grpo_lab.cli.main", "run", *options, "--out", str(out)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    summary = out / "latest" / "summary.json"
    return done.returncode, done.stdout, json.loads(summary.read_text()) if summary.is_file() else {}
