"""``max_staleness=0`` is synchronous training: real processes give, step for step, a plain loop's losses."""

import io
import json
from dataclasses import dataclass, replace

import pytest
import torch
from rich.console import Console
from synchronous_loop import InlineWorker, even_share, losses_by_hand

from grpo_lab.harness import runner, training
from grpo_lab.harness.recipe import Recipe
from grpo_lab.harness.run_dir import RunDir
from grpo_lab.recorders import ListRecorder
from grpo_lab.tasks import get_task
from grpo_lab.tasks.tiny_model import TinyModelSpec, build_model
from grpo_lab.trainer import AsyncGRPOTrainer

RECIPE = Recipe(
    name="equivalence",
    steps=5,
    prompts_per_step=4,
    num_generations=4,
    max_completion_length=8,
    train_prompts=64,
    heldout_prompts=0,
    learning_rate=1e-2,  # large: a policy that is one step old draws other tokens
    ramp_steps=0,
    max_staleness=0,
    batch_invariant=True,
    reward="synchronous_loop:even_share",
)
EVERY = (1, 2)  # optimizer steps a refit


@dataclass(frozen=True)
class Training:
    """What a run trained on, and what came of it, step by step."""

    losses: list
    grad_norms: list
    versions: list
    groups: list  # of each step: its groups of (prompt ids, completion ids, reward) triples
    logprobs: list
    weights: dict


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    network, tokenizer = build_model(TinyModelSpec(num_layers=1, hidden_size=32), get_task("sort_digits"), 0)
    network.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _one_thread():
    """Both sides of a comparison add in the same order; ``run`` sets the recipe's threads for itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class PlanKeeper(AsyncGRPOTrainer):
    """Keeps every step's plan: token ids are not in the trace."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.plans = []

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.plans.append(inputs)
        return super().training_step(model, inputs, num_items_in_batch)


def told(trainer, applied):
    def each(pick):
        return [[[pick(one) for one in group.samples] for group in plan.groups] for plan in trainer.plans]

    return Training(
        losses=[event["loss"] for event in applied],
        grad_norms=[event["grad_norm"] for event in applied],
        versions=[plan.version for plan in trainer.plans],
        groups=each(lambda one: (one.prompt_token_ids, one.completion_token_ids, one.reward)),
        logprobs=each(lambda one: one.behaviour_logprobs),
        weights={name: tensor.clone() for name, tensor in trainer.model.state_dict().items()},
    )


def run_for_real(recipe, model, out):
    """Engine, worker and trainer as ``grpo-lab run`` starts them; the losses come from its trace."""
    made, said = [], io.StringIO()

    def make(*arguments, **options):
        made.append(PlanKeeper(*arguments, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "AsyncGRPOTrainer", make)
        code = runner.run(replace(recipe, model=str(model), out=out), Console(file=said))
    assert code == 0, said.getvalue()
    trace = map(json.loads, (out / "latest" / "events.jsonl").read_text().splitlines())
    applied = [event for event in trace if event["kind"] == "optimizer_step_applied"]
    return told(made[0], applied)


def run_inline(recipe, model, out, versions_behind=0):
    """The same trainer with a worker that generates on demand."""
    dataset = training.load_training_data(recipe)
    _, tokenizer = build_model(TinyModelSpec(num_layers=1, hidden_size=32), get_task("sort_digits"), 0)
    worker = InlineWorker(recipe, model, dataset, tokenizer, versions_behind)
    recorder = ListRecorder("trainer", clock=lambda: 0.0)
    trainer = PlanKeeper(
        str(model),
        even_share,
        training.trainer_config(recipe, RunDir(out), ["http://127.0.0.1:1"]),
        dataset,
        rollout_worker=worker,
        recorder=recorder,
    )
    worker.model = trainer.model
    trainer.train()
    events = [record.event for record in recorder.records]
    applied = [
        {"loss": event.loss, "grad_norm": event.grad_norm}
        for event in events
        if event.kind == "optimizer_step_applied"
    ]
    return told(trainer, applied)


@pytest.fixture(scope="module", params=EVERY, ids=lambda k: f"refit_every_{k}")
def pair(request, model, tmp_path_factory):
    """(recipe, its real run)."""
    recipe = replace(RECIPE, weight_sync_steps=request.param)
    return recipe, run_for_real(recipe, model, tmp_path_factory.mktemp("runs"))


def assert_same(one, other):
    assert one.groups == other.groups
    assert one.logprobs == other.logprobs
    assert one.losses == other.losses
    assert one.grad_norms == other.grad_norms
    assert one.versions == other.versions
    assert all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())


def test_the_run_says_something(pair):
    """Equal numbers prove nothing when they are all 0, or when every sample is equally long."""
    recipe, real = pair
    assert len(real.losses) == recipe.steps
    assert all(abs(loss) > 1e-4 for loss in real.losses)
    assert all(norm > 1e-3 for norm in real.grad_norms)
    lengths = {len(tokens) for step in real.groups for group in step for _, tokens, _ in group}
    assert len(lengths) > 2


def test_versions_follow_the_refits(pair):
    recipe, real = pair
    assert real.versions == [1 + step // recipe.weight_sync_steps for step in range(recipe.steps)]


def test_losses_are_bitwise_those_of_the_same_trainer_with_inline_generation(pair, model, tmp_path):
    recipe, real = pair
    assert_same(real, run_inline(recipe, model, tmp_path))


def test_losses_are_those_of_an_independent_loop(pair, model):
    recipe, real = pair
    assert losses_by_hand(recipe, model, real.groups) == pytest.approx(real.losses, abs=1e-5)


def test_a_worker_that_is_one_version_behind_is_seen(pair, model, tmp_path):
    recipe, real = pair
    behind = run_inline(recipe, model, tmp_path, versions_behind=1)
    k = recipe.weight_sync_steps
    assert behind.losses[:k] == real.losses[:k]  # nothing is older than the first version
    assert behind.groups[k] != real.groups[k]
    assert behind.losses[k] != real.losses[k]
    by_hand = losses_by_hand(recipe, model, real.groups, versions_behind=1)
    assert by_hand[k:] != pytest.approx(real.losses[k:], abs=1e-5)
    with pytest.raises(AssertionError):
        assert_same(real, behind)


def test_a_run_repeats(model, tmp_path_factory, pair):
    recipe, real = pair
    assert_same(real, run_for_real(recipe, model, tmp_path_factory.mktemp("again")))
