"""The smallest fault that the canary sees: one stale norm, one stale layer, a whole stale version.

``python tests/conformance/canary_sensitivity.py`` prints the table of docs/conformance.md. The model is the
quickstart's; v is v-1 after one Adam step, in which every parameter moves by about the learning rate.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_lab.protocol.canary import Canary, judge
from grpo_lab.tasks import get_task
from grpo_lab.tasks.tiny_model import TinyModelSpec, make_tiny_model
from grpo_lab.trainer.weight_transfer import fixed_canary

LEARNING_RATES = (1e-6, 1e-5, 1e-4, 1e-3)
FAULTS = ("one stale norm", "one stale layer", "v-1")
STEPS_PER_VERSION = 1
TOLERANCE = 1e-3  # the trainer's default, as are 4 sequences of 16 tokens

Parameters = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Seen:
    """What the canary says of one fault.

    Attributes:
        gap: largest |logprob difference| of the faulty engine to the trainer.
        separation: the same of v to v-1: above 5 tolerances, a gap below one proves that v is served.
        outcome: the canary's verdict on the faulty engine; "fails" is what it should say.
    """

    fault: str
    learning_rate: float
    gap: float
    separation: float
    outcome: str


def quickstart_model() -> PreTrainedModel:
    made = make_tiny_model(TinyModelSpec(), get_task("sort_digits"), 0)
    return AutoModelForCausalLM.from_pretrained(made.path).float().eval()


def measure(model: PreTrainedModel, learning_rate: float) -> list[Seen]:
    """One Adam step from v-1 to v, then each fault: what is stale still has the weights of v-1."""
    canary = fixed_canary(4, 16, model.config.vocab_size, TOLERANCE)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    after = _one_update(model, before, learning_rate)
    trainer, previous = scores(model, after, canary), scores(model, before, canary)
    seen = []
    for fault in FAULTS:
        engine = scores(model, after | {name: before[name] for name in _stale(fault, before)}, canary)
        result = judge(engine, trainer, previous, TOLERANCE)
        assert result.separation is not None
        seen.append(Seen(fault, learning_rate, result.gap, result.separation, result.outcome))
    return seen


def _one_update(model: PreTrainedModel, before: Parameters, learning_rate: float) -> Parameters:
    """Adam's first step moves every parameter that has a gradient by about the learning rate."""
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in before.items()}
    optimizer = torch.optim.Adam(parameters.values(), lr=learning_rate)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (8, 24), generator=generator)
    for _ in range(STEPS_PER_VERSION):
        optimizer.zero_grad()
        logits = functional_call(model, parameters, (ids,)).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in parameters.items()}


def _stale(fault: str, parameters: Parameters) -> list[str]:
    if fault == "one stale norm":
        return ["model.layers.1.input_layernorm.weight"]
    if fault == "one stale layer":
        return [name for name in parameters if name.startswith("model.layers.1.")]
    return list(parameters)


@torch.no_grad()
def scores(model: PreTrainedModel, parameters: Parameters, canary: Canary) -> list[list[float]]:
    """Logprobs of the canary's tokens under ``parameters``, teacher forced."""
    ids = torch.tensor(canary.sequences)
    rows = functional_call(model, parameters, (ids,)).logits.log_softmax(-1)[:, :-1]
    return [[float(value) for value in row] for row in rows.gather(2, ids[:, 1:, None])[..., 0]]


def table(rows: list[Seen]) -> str:
    """Markdown: a line a learning rate, a column a fault."""
    lines = [
        "| learning rate | " + " | ".join(FAULTS) + " | v to v-1 |",
        "|---" * (len(FAULTS) + 2) + "|",
    ]
    for learning_rate in sorted({row.learning_rate for row in rows}):
        mine = {row.fault: row for row in rows if row.learning_rate == learning_rate}
        cells = [f"{mine[fault].gap:.1e} {mine[fault].outcome}" for fault in FAULTS]
        lines.append(f"| {learning_rate:g} | {' | '.join(cells)} | {mine['v-1'].separation:.1e} |")
    return "\n".join(lines)


def main() -> int:
    model = quickstart_model()
    print(table([row for rate in LEARNING_RATES for row in measure(model, rate)]))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
