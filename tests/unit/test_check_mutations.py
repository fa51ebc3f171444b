"""The mutation check of the checker: whichever rule is deleted, a test of the rules fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lab.check.rules import ALL_RULES

HERE = Path(__file__).parent
TESTS = [HERE / f"test_check_{name}.py" for name in ("planted", "liveness_rules", "metric_rules")]
PROGRAM = """
import sys

import pytest

from grpo_lab.check import Checker, check_records, check_trace
from grpo_lab.check.rules import ALL_RULES

deleted, *tests = sys.argv[1:]
left = tuple(rule for rule in ALL_RULES if rule.id != deleted)
assert len(left) == len(ALL_RULES) - (deleted != "none")
for function in (Checker.__init__, check_records, check_trace):
    function.__defaults__ = (left,)
sys.exit(pytest.main(["-x", "-q", "--timeout=0", "-p", "no:cacheprovider", *tests]))
"""


def outcome_without(rule):
    command = [sys.executable, "-c", PROGRAM, rule, *map(str, TESTS)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=HERE.parents[1])
    return pytest.ExitCode(done.returncode), done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", [rule.id for rule in ALL_RULES])
def test_a_deleted_rule_is_missed(rule):
    code, said = outcome_without(rule)
    assert code is pytest.ExitCode.TESTS_FAILED, said


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_with_all_rules_the_tests_pass():
    code, said = outcome_without("none")
    assert code is pytest.ExitCode.OK, said
