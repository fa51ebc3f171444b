"""Every nonsense value is refused at construction, by field, value and range."""

import dataclasses
import math
import pickle
import subprocess
import sys

import pytest

from grpo_lab.errors import ConfigError
from grpo_lab.trainer.config import AsyncGRPOConfig, field_rules
from grpo_lab.trainer.rules import Flag, Integer, Number, Optional, Rule


def config(**values):
    return AsyncGRPOConfig(output_dir="unused", use_cpu=True, report_to="none", **values)


NOT_A_NUMBER = ["1", None, True, [1], math.nan, math.inf, -math.inf]
NOT_AN_INTEGER = [*NOT_A_NUMBER, 1.5, 2.0]
WRONG_VALUES = {
    # integers, with what lies just outside their range
    "num_generations": [*NOT_AN_INTEGER, 1, 0, -3],
    "max_completion_length": [*NOT_AN_INTEGER, 0, -1],
    "top_k": [*NOT_AN_INTEGER, -1],
    "max_inflight_tasks": [*NOT_AN_INTEGER, 0, -1],
    "queue_maxsize": [*NOT_AN_INTEGER, 0, -5],
    "token_budget": [*NOT_AN_INTEGER, 1, 0, 256],
    "max_staleness": [*NOT_AN_INTEGER, -1],
    "max_staleness_steps": ["1", True, 1.5, math.nan, -1],
    "window": [*NOT_AN_INTEGER, 0, -1],
    "weight_sync_steps": [*NOT_AN_INTEGER, 0, -1],
    "sync_attempts": [*NOT_AN_INTEGER, 0, 101],
    "first_term": [*NOT_AN_INTEGER, 0, -1],
    "min_engines": [*NOT_AN_INTEGER, 0, 2],
    "bucket_bytes": [*NOT_AN_INTEGER, 0, 4095],
    "ring_slots": [*NOT_AN_INTEGER, 0, 65],
    "pack_threads": [*NOT_AN_INTEGER, 0],
    "canary_sequences": [*NOT_AN_INTEGER, 0],
    "canary_length": [*NOT_AN_INTEGER, 1],
    "request_retries": [*NOT_AN_INTEGER, -1, 11],
    "num_completions_to_print": ["1", True, 0, -1, 1.5],
    "generation_seed": ["0", True, -1, 2**32, 0.5],
    "seed": [*NOT_AN_INTEGER, -1, 2**32],
    "per_device_train_batch_size": [*NOT_AN_INTEGER, 0, -8, 12],
    "gradient_accumulation_steps": [*NOT_AN_INTEGER[:2], True, 0, 2, 1.0],
    "max_steps": [*NOT_AN_INTEGER, 0, -2],
    "save_total_limit": ["1", True, 0],
    "ddp_timeout": [*NOT_AN_INTEGER, 0],
    # numbers
    "temperature": [*NOT_A_NUMBER, 0, 0.0, -0.1, 101],
    "top_p": [*NOT_A_NUMBER, 0, -0.1, 1.01],
    "epsilon": [*NOT_A_NUMBER, 0, -0.2, 1.1],
    "epsilon_high": ["0.2", True, math.nan, math.inf, 0, -1, 0.1],
    "tis_cap": [*NOT_A_NUMBER, 0, -1],
    "mis_cap": [*NOT_A_NUMBER, 0, -1],
    "delta": ["2", True, math.nan, math.inf, 0, -1, 1.0],
    "icepop_low": [*NOT_A_NUMBER, -1],
    "icepop_high": [*NOT_A_NUMBER, 0, -1],
    "advantage_epsilon": [*NOT_A_NUMBER, 0, -1e-4],
    "canary_tolerance": [*NOT_A_NUMBER, 0, -1e-3],
    "learning_rate": [*NOT_A_NUMBER, -1e-6],
    "weight_decay": [*NOT_A_NUMBER, -0.1],
    "max_grad_norm": [*NOT_A_NUMBER, -1],
    "adam_beta1": [*NOT_A_NUMBER, -0.1, 1.1],
    "adam_beta2": [*NOT_A_NUMBER, -0.1, 1.1],
    "adam_epsilon": [*NOT_A_NUMBER, 0],
    "warmup_steps": [*NOT_A_NUMBER, -1],
    "num_train_epochs": [*NOT_A_NUMBER, 0, -1],
    "logging_steps": [*NOT_A_NUMBER, 0, -1],
    "save_steps": [*NOT_A_NUMBER, 0, -1],
    "reward_timeout": [*NOT_A_NUMBER, 0, -1, 86_401],
    "starvation_timeout": [*NOT_A_NUMBER, 0, -1],
    "pause_timeout": [*NOT_A_NUMBER, 0],
    "sync_timeout": [*NOT_A_NUMBER, 0],
    "vllm_server_timeout": [*NOT_A_NUMBER, 0, -240],
    "request_timeout": [*NOT_A_NUMBER, 0],
    "heartbeat_stale_after_s": [*NOT_A_NUMBER, 0],
    # words
    "loss_type": ["ppo", "GRPO", "", None, 1],
    "correction": ["gspo", "", None, True],
    "scale_rewards": ["std", True, None],
    "staleness_policy": ["fifo", "", None],
    "pause_mode": ["stop", "", None],
    "sync_scope": ["local", "", None],
    "weight_transport": ["nccl!", "", None],
    "wire_dtype": ["int8", "fp16", "", 16],
    "eval_strategy": ["steps", "epoch"],
    "save_strategy": ["epoch", "best", "sometimes"],
    "logging_strategy": ["epoch", "never"],
    # flags
    "final_sync": [0, 1, "true", None],
    "clear_cache": [0, 1, "false", None],
    "log_completions": [1, "yes", None],
    "remove_unused_columns": [True, None],
    "ignore_data_skip": [False, None],
    "ddp_find_unused_parameters": [1, "no"],
    "auto_find_batch_size": [True],
    "load_best_model_at_end": [True],
    "label_smoothing_factor": [0.1],
    "deepspeed": [{}, "ds.json"],
    "fsdp": ["full_shard", True],
    # the rest
    "vllm_server_base_url": [
        "", "localhost:8000", "ftp://a", "http://", "http://a:99999", "http://a:x", "http://a b",
        "http://a,http://a/", [], [1], None, 8000, ["http://a", "nonsense"],
    ],
    "reward_weights": [[], "1", [1.0, "2"], [math.nan], [True], 1.0],
    "chat_template_kwargs": ["x", [1], {1: 2}],
    "model_init_kwargs": ["x", [1], {1: 2}],
    "events_dir": ["", "  ", 3],
}  # fmt: skip
CASES = [(name, value) for name, values in WRONG_VALUES.items() for value in values]


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{name}={value!r}" for name, value in CASES])
def test_nonsense_is_refused_by_name(name, value):
    with pytest.raises(ConfigError) as caught:
        config(**{name: value})
    assert caught.value.field == name
    assert repr(value) in str(caught.value)
    assert "expected" in str(caught.value)


def test_every_field_with_a_rule_is_in_the_table_above():
    assert set(field_rules()) == set(WRONG_VALUES)


def test_every_field_of_ours_has_a_rule_and_help():
    inherited = {item.name for item in dataclasses.fields(AsyncGRPOConfig.__mro__[1])}
    own = [item for item in dataclasses.fields(AsyncGRPOConfig) if item.name not in inherited]
    assert len(own) > 40
    assert all(item.metadata["help"] and item.metadata["rule"] for item in own)


def test_defaults_obey_their_rules():
    built = config()
    for name, rule in field_rules().items():
        assert rule.allows(getattr(built, name)), name


COMBINATIONS = [
    ({"epsilon": 0.3, "epsilon_high": 0.2}, "epsilon_high"),
    ({"correction": "tis", "top_p": 0.9}, "correction"),
    ({"correction": "clip", "top_k": 5}, "correction"),
    ({"loss_type": "gspo", "top_k": 5}, "loss_type"),
    ({"loss_type": "cispo", "correction": "tis"}, "correction"),
    ({"delta": 1.25, "epsilon_high": 0.3}, "delta"),
    ({"icepop_low": 5.0}, "icepop_low"),
    ({"max_completion_length": 100, "token_budget": 100}, "token_budget"),
    ({"num_generations": 8, "max_inflight_tasks": 7}, "max_inflight_tasks"),
    ({"min_engines": 3, "vllm_server_base_url": "http://a,http://b"}, "min_engines"),
    ({"window": 2}, "window"),
    ({"window": 3, "staleness_policy": "window", "max_staleness": 1}, "window"),
    ({"weight_sync_steps": 4, "max_staleness_steps": 2}, "max_staleness_steps"),
    ({"per_device_train_batch_size": 10, "num_generations": 4}, "per_device_train_batch_size"),
]


@pytest.mark.parametrize(("values", "field"), COMBINATIONS, ids=[field for _, field in COMBINATIONS])
def test_values_that_exclude_each_other_are_refused(values, field):
    with pytest.raises(ConfigError) as caught:
        config(**values)
    assert caught.value.field == field


def test_derived_values():
    built = config(
        per_device_train_batch_size=64,
        num_generations=8,
        vllm_server_base_url="http://a:1/, https://b:2",
        seed=7,
    )
    assert built.groups_per_step == 8
    assert built.engine_urls == ("http://a:1", "https://b:2")
    assert built.sampling_seed == 7
    assert dataclasses.replace(built, generation_seed=0).sampling_seed == 0
    assert built.samples_untruncated
    assert not dataclasses.replace(built, temperature=0.7).samples_untruncated
    assert built.staleness_bound.groups_per_step == 8
    assert built.timeouts.connect_s == built.vllm_server_timeout


def test_it_pickles_and_can_be_rebuilt():
    built = config(num_generations=4, reward_weights=[1.0, 0.5])
    assert pickle.loads(pickle.dumps(built)) == built
    assert dataclasses.replace(built, top_p=0.5).top_p == 0.5
    assert built.to_dict()["num_generations"] == 4


def test_an_error_survives_pickling():
    with pytest.raises(ConfigError) as caught:
        config(top_p=2)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_importing_the_config_does_not_import_the_trainer():
    code = "import sys, grpo_lab.trainer.config; print('transformers.trainer' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [(Integer(1), 1), (Number(0), 0), (Number(0, 1), 0.5), (Flag(), False), (Optional(Integer(1)), None)],
)
def test_rules_allow_what_they_should(rule: Rule, allowed):
    assert rule.allows(allowed)
