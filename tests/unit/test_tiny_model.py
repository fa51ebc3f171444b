"""Tiny models are real Hugging Face directories: cached, raced for, refused by name."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from grpo_lab.errors import ConfigError, DataError, ModelError
from grpo_lab.tasks import Task, exact_match, get_task
from grpo_lab.tasks.evaluation import decode_batch, evaluate_greedy
from grpo_lab.tasks.tiny_model import (
    WARMUP_FILE,
    TinyModelSpec,
    _syntax,
    annealed_baseline,
    build_model,
    cache_directory,
    make_tiny_model,
    model_key,
)
from grpo_lab.tasks.tokenizer import make_tokenizer
from grpo_lab.tasks.warmup import answer_batch, warm_up
from grpo_lab.tasks.warmup_spec import WarmupSpec


def _copy_one_digit(rng):
    digit = str(rng.randrange(10))
    noise = "".join(rng.choices("0123456789", k=2))
    return f"{noise}{digit}>", digit


def _copy_first_digit(rng):
    prompt, _ = _copy_one_digit(rng)
    return prompt, prompt[0]


COPY = Task(
    "copy", "copy the last digit: learned in seconds", _copy_one_digit, "0123456789>", 3, (exact_match,)
)
SMALL = TinyModelSpec(
    num_layers=1,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=2,
    intermediate_size=64,
    warmup=WarmupSpec(
        stop_pass_rate=0.5, look_every_steps=10, development_rows=32, batch_size=64, learning_rate=1e-2
    ),
)
UNTRAINED = TinyModelSpec(warmup=WarmupSpec(stop_pass_rate=0))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_tokenizer_gives_one_token_a_character_and_adds_none(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("52814>")
    assert tokenizer.convert_ids_to_tokens(ids) == list("52814>")
    assert tokenizer.decode(ids) == "52814>"
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "52814>"
    assert tokenizer.decode(tokenizer.encode("1 2 + 3")) == "1 2 + 3"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


def test_the_chat_template_means_what_the_plain_prompt_means():
    tokenizer = make_tokenizer()
    turns = [{"role": "user", "content": "21>"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == "21>"
    turns.append({"role": "assistant", "content": "12"})
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "21>12<end>"


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_directory_loads_with_the_auto_classes(architecture, cache):
    spec = TinyModelSpec(architecture=architecture, warmup=UNTRAINED.warmup)
    made = make_tiny_model(spec, get_task("sort_digits"), seed=0)
    assert made.path.parent == cache / "models"
    model = AutoModelForCausalLM.from_pretrained(made.path)
    tokenizer = AutoTokenizer.from_pretrained(made.path)
    assert model.config.model_type == architecture
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert 500_000 < model.num_parameters() < 3_000_000
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_warm_up_stops_by_its_rule_and_the_cache_is_used():
    looks = []
    made = make_tiny_model(SMALL, COPY, seed=0, progress=lambda step, most, accuracy: looks.append(accuracy))
    assert made.development_pass_rate >= 0.5
    assert made.warmup_steps == len(looks)
    assert made.warmup_steps % 10 == 0
    assert all(accuracy is None or accuracy < 0.5 for accuracy in looks[:-1])
    again = make_tiny_model(SMALL, COPY, seed=0, progress=lambda *_: pytest.fail("made twice"))
    assert again == made
    assert make_tiny_model(UNTRAINED, COPY, seed=0).path != made.path


def test_equal_arguments_give_equal_weights_and_leave_the_global_random_state():
    state = torch.random.get_rng_state()
    first, second = (build_model(SMALL, COPY, seed=5)[0].state_dict() for _ in range(2))
    other = build_model(SMALL, COPY, seed=6)[0].state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_key_tells_specs_tasks_and_seeds_apart():
    sort = get_task("sort_digits")
    keys = {model_key(SMALL, sort, 0), model_key(SMALL, sort, 1), model_key(SMALL, COPY, 0)}
    assert len(keys | {model_key(UNTRAINED, sort, 0)}) == 4


def test_the_key_follows_what_a_task_draws_and_not_how_it_is_described():
    assert model_key(SMALL, replace(COPY, description="other words"), 0) == model_key(SMALL, COPY, 0)
    assert model_key(SMALL, replace(COPY, draw=_copy_first_digit), 0) != model_key(SMALL, COPY, 0)


def test_code_counts_without_its_comments_and_docstrings():
    plain = "class A:\n    def f(self):\n        return 1\n"
    told = '"""m"""\nclass A:\n    """a"""\n\n    def f(self):\n        """f"""\n        return 1  # why\n'
    assert _syntax(told) == _syntax(plain)
    assert _syntax(plain.replace("1", "2")) != _syntax(plain)


def test_a_task_brings_its_own_warm_up_unless_the_spec_has_one():
    own = WarmupSpec(stop_pass_rate=0)
    task = replace(COPY, warmup=own)
    made = make_tiny_model(TinyModelSpec(num_layers=1), task, 0)
    assert made.warmup_steps == 0
    assert json.loads((made.path / WARMUP_FILE).read_text())["spec"]["warmup"]["stop_pass_rate"] == 0
    assert TinyModelSpec(num_layers=1, warmup=own).warmup_for(COPY) == own
    assert model_key(TinyModelSpec(warmup=own), COPY, 0) == model_key(TinyModelSpec(), task, 0)


def test_no_foreign_progress_bar_is_shown_and_the_setting_stays(capfd):
    transformers_logging.enable_progress_bar()
    make_tiny_model(UNTRAINED, COPY, 0)
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.is_progress_bar_enabled()


def test_makers_that_race_end_with_one_whole_model(cache):
    spec = TinyModelSpec(num_layers=1, warmup=UNTRAINED.warmup)
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: make_tiny_model(spec, COPY, 0), range(3)))
    assert len(set(made)) == 1
    assert [path.name for path in (cache / "models").iterdir()] == [made[0].path.name]
    AutoModelForCausalLM.from_pretrained(made[0].path)


def test_a_warm_up_that_misses_its_rule_says_so_and_leaves_nothing(cache):
    spec = TinyModelSpec(num_layers=1, warmup=WarmupSpec(stop_pass_rate=0.9, max_steps=2, look_every_steps=1))
    with pytest.raises(ModelError, match=r"in 2 steps, the stopping rule asks for 0\.9"):
        make_tiny_model(spec, get_task("sort_digits"), 0)
    assert not list((cache / "models").iterdir())


def test_a_directory_with_something_else_is_refused(tmp_path):
    with pytest.raises(ModelError, match="not a tiny model made here"):
        make_tiny_model(UNTRAINED, COPY, 0, directory=tmp_path)
    other = make_tiny_model(UNTRAINED, COPY, 0, directory=tmp_path / "other")
    assert json.loads((other.path / WARMUP_FILE).read_text())["seed"] == 0
    with pytest.raises(ModelError, match="holds the model"):
        make_tiny_model(UNTRAINED, COPY, 1, directory=tmp_path / "other")


def test_a_place_that_cannot_be_written_is_told_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write a model to .*set GRPO_LAB_CACHE"):
        make_tiny_model(SMALL, COPY, 0, progress=lambda *_: pytest.fail("worked first"))


def test_the_cache_is_in_the_home_directory_by_default(monkeypatch):
    monkeypatch.delenv("GRPO_LAB_CACHE")
    assert cache_directory().parts[-2:] == (".cache", "grpo_lab")


@pytest.mark.parametrize(
    ("field", "value"),
    [("architecture", "gpt2"), ("num_layers", 0), ("hidden_size", 130), ("num_kv_heads", 3)],
)
def test_bad_sizes_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        TinyModelSpec(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("stop_pass_rate", 1.0), ("look_every_steps", 0), ("learning_rate", float("nan"))]
)
def test_bad_warm_ups_are_refused(field, value):
    with pytest.raises(ConfigError, match=field):
        WarmupSpec(**{field: value})


def test_a_task_with_other_characters_is_refused():
    task = Task("letters", "", _copy_one_digit, "01a", 3, (exact_match,))
    with pytest.raises(ConfigError, match="alphabet='a'"):
        make_tiny_model(UNTRAINED, task, 0)


def test_only_answers_and_their_end_are_learned():
    tokenizer = make_tokenizer()
    tokens, labels = answer_batch(
        tokenizer, [{"prompt": "21>", "answer": "12"}, {"prompt": "3>", "answer": "3"}]
    )
    assert tokenizer.batch_decode(tokens) == ["21>12<end>", "3>3<end><pad><pad>"]
    learned = [tokenizer.decode(row[row >= 0]) for row in labels]
    assert learned == ["12<end>", "3<end>"]


def test_decoding_in_a_batch_equals_decoding_alone():
    model, tokenizer = build_model(TinyModelSpec(num_layers=2), COPY, 0)
    prompts = [tokenizer.encode(text) for text in ("1>", "123456>", "98765432>")]
    with torch.no_grad():
        for prompt, completion in zip(prompts, decode_batch(model, prompts, 6, 1), strict=True):
            sequence = list(prompt)
            for token in completion:
                assert int(model(torch.tensor([sequence])).logits[0, -1].argmax()) == token
                sequence.append(token)


def test_decoding_stops_at_the_end_token():
    model, _ = build_model(SMALL, COPY, 0)
    end = torch.tensor([1, 3])
    assert decode_batch(model, [[4], [5]], 4, 1, pick=lambda logits: end) == [[1], [3, 3, 3, 3]]


def test_evaluation_counts_right_answers_and_restores_the_mode():
    model, tokenizer = build_model(SMALL, COPY, 0)
    warm_up(model, tokenizer, COPY, SMALL.warmup, seed=0)
    model.train()
    rows = COPY.generate("heldout", 30, 0)
    accuracy = evaluate_greedy(model, tokenizer, rows, COPY, batch_size=7)
    assert model.training
    ids = [tokenizer.encode(row["prompt"]) for row in rows]
    texts = tokenizer.batch_decode(decode_batch(model.eval(), ids, 3, 1), skip_special_tokens=True)
    assert accuracy == sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / 30
    assert accuracy > 0.2
    wrong = [{**row, "answer": "?"} for row in rows]
    assert evaluate_greedy(model, tokenizer, wrong, COPY) == 0
    chat = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    assert evaluate_greedy(model, tokenizer, chat, COPY) == accuracy


def test_evaluation_without_rows_is_refused():
    model, tokenizer = build_model(SMALL, COPY, 0)
    with pytest.raises(DataError, match="at least one row"):
        evaluate_greedy(model, tokenizer, [], COPY)


def test_annealing_the_same_steps_is_measured_on_held_out_rows():
    baseline = annealed_baseline(SMALL, COPY, 0, steps=200, heldout_rows=30)
    assert baseline.steps == 200
    assert baseline.heldout_accuracy > 0.5
    assert annealed_baseline(SMALL, COPY, 0, steps=1, heldout_rows=30).heldout_accuracy < 0.5


def test_a_disk_that_is_full_at_the_end_is_told_too(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(ModelError, match=r"cannot write a model to .*No space left.*set GRPO_LAB_CACHE"):
        make_tiny_model(UNTRAINED, COPY, 0)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
