"""The numbers of a step: loss and gradient against plain PyTorch, metrics, gaps, and when nothing changes."""

import io
import math

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from test_trainer_contract import StubSync
from trainer_stub import StubWorker, events, make_trainer, sample, tiny_model

from grpo_lab.algorithms import CORRECTIONS, OBJECTIVES
from grpo_lab.errors import ConfigError, GrpoLabError
from grpo_lab.trainer.batching import StepPlan, score_sequences
from grpo_lab.trainer.logging import MetricMeans, print_completions
from grpo_lab.types import RolloutGroup

SAMPLES_PER_STEP = 8


class Recording(StubWorker):
    """Keeps what it gave."""

    def __init__(self, **options):
        super().__init__(**options)
        self.given = []

    def make_group(self):
        self.given.append(super().make_group())
        return self.given[-1]


def reference_loss(model, groups, loss_type, correction, longest):
    """The step's loss with padded batches and no shortcuts. Surrogates spelled out again."""
    rows = []
    for group in groups:
        rewards = torch.tensor([one.reward for one in group.samples])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for one, advantage in zip(group.samples, advantages, strict=True):
            ids = torch.tensor([one.prompt_token_ids + one.completion_token_ids])
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
            logp = F.log_softmax(logits, -1)[0, len(one.prompt_token_ids) - 1 : -1]
            logp = logp.gather(1, torch.tensor(one.completion_token_ids)[:, None])[:, 0]
            old = torch.tensor(one.behaviour_logprobs)
            if correction == "none":
                surrogate = advantage * torch.exp(logp - logp.detach())
            elif correction == "tis":
                weight = torch.exp(logp.detach() - old).clamp(max=2.0)
                surrogate = advantage * weight * torch.exp(logp - logp.detach())
            else:
                ratio = torch.exp(logp - old)
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            rows.append(-surrogate)
    if loss_type == "grpo":
        return torch.stack([row.mean() for row in rows]).mean()
    if loss_type == "dapo":
        return torch.cat(rows).mean()
    return torch.cat(rows).sum() / (longest * len(rows))


CASES = [(loss, correction) for loss in ("grpo", "dapo", "dr_grpo") for correction in ("none", "tis", "clip")]


@pytest.mark.parametrize(("loss_type", "correction"), CASES, ids=[f"{a}-{b}" for a, b in CASES])
def test_loss_and_gradient_are_those_of_plain_torch_however_the_step_is_split(
    tmp_path, loss_type, correction
):
    norms, losses = [], []
    for budget in (4096, 20, 9):
        worker = Recording()
        trainer = make_trainer(
            tmp_path / str(budget),
            worker,
            max_steps=1,
            loss_type=loss_type,
            correction=correction,
            token_budget=budget,
            optim="sgd",
            max_grad_norm=0.0,
            learning_rate=1.0,
            lr_scheduler_type="constant",
        )
        before = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
        trainer.train()
        gradient = {name: before[name] - one.detach() for name, one in trainer.model.named_parameters()}
        model = tiny_model()
        loss = reference_loss(model, worker.given[:2], loss_type, correction, longest=8)
        loss.backward()
        assert len(events(trainer, "micro_batch_began")) == {4096: 1, 20: 2, 9: 7}[budget] or budget < 4096
        for name, parameter in model.named_parameters():
            assert torch.allclose(gradient[name], parameter.grad, atol=1e-6), (budget, name)
        (applied,) = events(trainer, "optimizer_step_applied")
        assert applied.loss == pytest.approx(loss.item(), abs=1e-6)
        norms.append(applied.grad_norm)
        losses.append(applied.loss)
    assert max(norms) - min(norms) < 1e-6 * max(1.0, *norms)
    assert max(losses) - min(losses) < 1e-6


def test_micro_batches_are_under_the_budget_and_hold_all_samples_with_signal(tmp_path):
    trainer = make_trainer(tmp_path, StubWorker(), max_steps=2, token_budget=20)
    trainer.train()
    passes = events(trainer, "micro_batch_began")
    assert len(passes) > 2
    assert all(0 < one.tokens <= 20 for one in passes)
    assert {one.optimizer_step for one in passes} == {0, 1}
    assert sum(one.samples for one in passes if one.optimizer_step == 0) == SAMPLES_PER_STEP


def test_a_sample_larger_than_the_budget_ends_the_run_by_name(tmp_path):
    class LongPrompts(StubWorker):
        def make_group(self):
            group = super().make_group()
            samples = tuple(
                sample(f"{i}", range(3, 15), (4, 5), float(i % 2), self.version) for i in range(4)
            )
            return RolloutGroup(group.group_id, group.number, group.prompt_index, 0, samples, self.version)

    with pytest.raises(ConfigError, match="token_budget=9: expected at least 13"):
        make_trainer(tmp_path, LongPrompts(), token_budget=9).train()


class EqualRewards(StubWorker):
    def make_group(self):
        group = super().make_group()
        for one in group.samples:
            object.__setattr__(one, "reward", 1.0)
        return group


def test_a_step_without_signal_runs_no_forward_pass_and_changes_nothing_without_momentum(tmp_path):
    trainer = make_trainer(tmp_path, EqualRewards(), max_steps=2)
    trainer.train()
    applied = events(trainer, "optimizer_step_applied")
    assert [step.changed for step in applied] == [False, False]
    assert [step.loss for step in applied] == [0.0, 0.0]
    assert events(trainer, "micro_batch_began") == []
    assert trainer.term.cursor.low_water == 4


def test_a_learning_rate_of_zero_changes_nothing(tmp_path):
    trainer = make_trainer(tmp_path, StubWorker(), learning_rate=0.0)
    trainer.train()
    assert not any(step.changed for step in events(trainer, "optimizer_step_applied"))
    assert all(step.grad_norm > 0 for step in events(trainer, "optimizer_step_applied"))


def test_a_tiny_change_is_a_change(tmp_path):
    trainer = make_trainer(tmp_path, StubWorker(), learning_rate=1e-7, max_steps=1)
    trainer.train()
    assert events(trainer, "optimizer_step_applied")[0].changed


class OwnLogprobs(StubWorker):
    """Samples with the logprobs of the trainer's model, when it was given one, shifted by ``error``."""

    def __init__(self, error=0.0, late=0, **options):
        super().__init__(**options)
        self.error = error
        self.late = late
        self.model = None

    def make_group(self):
        group = super().make_group()
        for one in group.samples:
            whole = one.prompt_token_ids + one.completion_token_ids
            rows = score_sequences(self.model, [whole], "cpu")[0][len(one.prompt_token_ids) - 1 :]
            object.__setattr__(one, "behaviour_logprobs", tuple(value + self.error for value in rows))
            if self.late:
                object.__setattr__(one, "spans", ())
                object.__setattr__(one, "version_first", self.version - self.late)
        return group


def gaps(tmp_path, worker, **extra):
    trainer = make_trainer(tmp_path, worker, max_steps=3, **extra)
    worker.model = trainer.model
    trainer.train()
    return events(trainer, "logprob_gap_measured")


def test_the_logprob_gap_is_measured_at_every_version(tmp_path):
    measured = gaps(tmp_path, OwnLogprobs())
    assert [one.version for one in measured] == [1, 2, 3]
    assert all(one.gap_max < 1e-5 and one.tokens > 0 for one in measured)


def test_the_gap_shows_an_engine_that_computes_something_else(tmp_path):
    measured = gaps(tmp_path, OwnLogprobs(error=0.01))
    assert all(one.gap_max == pytest.approx(0.01, abs=1e-4) for one in measured)
    assert all(one.gap_mean == pytest.approx(0.01, abs=1e-4) for one in measured)


@pytest.mark.parametrize("extra", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}])
def test_no_gap_is_measured_where_logprobs_do_not_compare(tmp_path, extra):
    assert gaps(tmp_path, OwnLogprobs(error=1.0), **extra) == []


def test_no_gap_is_measured_on_older_weights(tmp_path):
    assert gaps(tmp_path, OwnLogprobs(error=1.0, late=1), max_staleness=3) == []
    measured = gaps(tmp_path / "k2", OwnLogprobs(), weight_sync_steps=2)
    assert [one.version for one in measured] == [1, 2], "not in the step after, when the weights have moved"


def test_a_loss_that_is_not_finite_stops_before_the_parameters_are_touched(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = math.inf
    trainer = make_trainer(tmp_path, StubWorker(), model=model, correction="tis")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(GrpoLabError, match="loss of optimizer step 0 is nan"):
        trainer.train()
    assert all(
        torch.equal(
            a,
            b,
        )
        for a, b in zip(before, model.parameters(), strict=True)
    )


def test_staleness_is_bounded_and_reported(tmp_path):
    class Late(StubWorker):
        """Its groups are two versions old when it can be."""

        def make_group(self):
            now, self.version = self.version, max(1, self.version - 2)
            group = super().make_group()
            self.version = now
            return group

    trainer = make_trainer(tmp_path / "a", Late(), max_steps=4, max_staleness=2)
    trainer.train()
    ages = [group.version - min(group.versions_first) for group in events(trainer, "group_consumed")]
    assert ages == [0, 0, 1, 1, 2, 2, 2, 2]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["staleness/max"] for log in logs] == [0, 1, 2, 2]

    class RefreshedAfter(Late):
        """Two groups that are too old come first; then it samples anew."""

        def make_group(self):
            return super().make_group() if self.number % 4 < 2 else StubWorker.make_group(self)

    bounded = make_trainer(
        tmp_path / "b", RefreshedAfter(), max_steps=4, max_staleness=1, staleness_policy="drop"
    )
    bounded.train()
    consumed, dropped = events(bounded, "group_consumed"), events(bounded, "group_dropped")
    assert all(group.version - min(group.versions_first) <= 1 for group in consumed)
    assert [one.reason for one in dropped] == ["stale"] * 4
    done = sorted(one.prompt_index for one in (*consumed, *dropped))
    assert done == list(range(len(done))), "dropped prompts do not pin the cursor"
    assert bounded.term.cursor.low_water == len(done)


def test_corrections_report_which_versions_they_used(tmp_path):
    settings = [{"correction": name} for name in CORRECTIONS] + [{"loss_type": name} for name in OBJECTIVES]
    for setting in settings:
        (name,) = setting.values()
        trainer = make_trainer(tmp_path / name, StubWorker(), max_steps=1, **setting)
        trainer.train()
        group = events(trainer, "group_consumed")[0]
        assert (group.correction, group.correction_versions) == (name, () if name == "none" else (1,))
        log = trainer.state.log_history[0]
        assert log["sampling/importance_sampling_ratio/mean"] > 0
        assert 0 < log["sampling/effective_sample_size"] <= 1


def test_logs_have_trls_names(tmp_path):
    trainer = make_trainer(tmp_path, StubWorker(), make_weight_sync=StubSync, max_steps=4, logging_steps=2)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["step"] for log in logs] == [2, 4]
    expected = {
        "loss", "grad_norm", "learning_rate", "weight_sync_time_s", "staleness/mean", "staleness/max",
        "reward", "reward_std", "completions/mean_length", "completions/clipped_ratio", "tokens",
        "frac_reward_zero_std",
    }  # fmt: skip
    assert expected <= set(logs[0])
    assert logs[0]["weight_sync_time_s"] == 0.25
    assert logs[1]["epoch"] == 4 * 2 / 40
    first = events(trainer, "optimizer_step_applied")[:2]
    assert logs[0]["loss"] == pytest.approx(sum(step.loss for step in first) / 2)
    assert logs[0]["reward"] == pytest.approx(sum(step.reward_mean for step in first) / 2)


def test_epochs_count_passes_over_the_prompts(tmp_path):
    trainer = make_trainer(tmp_path, StubWorker(), max_steps=-1, num_train_epochs=0.5)
    assert trainer.train().global_step == 10, "20 of 40 prompts, 2 a step"
    assert trainer.state.epoch == 0.5


def test_means_keep_extremes():
    means = MetricMeans()
    means.add({"a": 1.0, "x/max": 1.0, "x/min": 1.0})
    means.add({"a": 2.0, "x/max": 5.0, "x/min": 5.0})
    assert means.take() == {"a": 1.5, "x/max": 5.0, "x/min": 1.0}
    assert means.take() == {}


def test_the_table_of_completions_is_limited_and_shows_text_as_it_is():
    texts = {"prompt_text": "[bold]2+2", "completion_text": "[/red] 4"}
    samples = tuple(sample(str(i), (3,), (4,), 1.0, 1, **texts) for i in range(3))
    plan = StepPlan(1, 0, 2, (RolloutGroup("g", 0, 0, 1, samples, 1),))
    out = io.StringIO()
    print_completions(plan, 7, limit=2, console=Console(file=out, width=100))
    text = out.getvalue()
    assert "step 7" in text
    assert text.count("[bold]2+2") == 2
    assert text.count("[/red] 4") == 2


def test_log_completions_prints_at_logs(tmp_path, capsys):
    make_trainer(
        tmp_path, StubWorker(), log_completions=True, num_completions_to_print=1, max_steps=2
    ).train()
    assert "completions of step 2" in capsys.readouterr().out
