"""All rules, in the order in which they are shown."""

from __future__ import annotations

from grpo_lab.check.engine_rules import ENGINE_RULES
from grpo_lab.check.liveness_rules import LIVENESS_RULES
from grpo_lab.check.metric_rules import METRIC_RULES
from grpo_lab.check.rollout_rules import ROLLOUT_RULES
from grpo_lab.check.rule import Rule
from grpo_lab.check.training_rules import TRAINING_RULES
from grpo_lab.check.transfer_rules import TRANSFER_RULES
from grpo_lab.check.version_rules import VERSION_RULES


def _place(rule: type[Rule]) -> tuple[int, int]:
    return "SLHD".index(rule.id[0]), int(rule.id[1:])


ALL_RULES: tuple[type[Rule], ...] = tuple(
    sorted(
        (
            *VERSION_RULES,
            *TRANSFER_RULES,
            *ENGINE_RULES,
            *ROLLOUT_RULES,
            *TRAINING_RULES,
            *LIVENESS_RULES,
            *METRIC_RULES,
        ),
        key=_place,
    )
)
