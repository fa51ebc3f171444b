"""Tasks: answers are right, splits cannot meet, rewards keep TRL's calling style."""

import pickle

import pytest

from grpo_lab.errors import ConfigError, DataError
from grpo_lab.tasks import Task, completion_text, exact_match, get_task, task_names
from grpo_lab.tasks.base import split_of


def test_names_are_registered():
    assert task_names() == ("sort_digits", "running_sum", "reverse_digits", "distinct_digits")


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"task='sort'.*sort_digits, running_sum"):
        get_task("sort")


@pytest.mark.parametrize("name", task_names())
def test_splits_share_no_prompt_whatever_the_seed(name):
    task = get_task(name)
    prompts = {
        split: {row["prompt"] for seed in (0, 1) for row in task.generate(split, 400, seed)}
        for split in ("train", "development", "heldout")
    }
    assert not prompts["train"] & prompts["heldout"]
    assert not prompts["train"] & prompts["development"]
    assert not prompts["development"] & prompts["heldout"]
    assert all(split_of(prompt) == split for split, found in prompts.items() for prompt in found)


@pytest.mark.parametrize("name", task_names())
def test_rows_follow_from_the_seed_alone(name):
    task = get_task(name)
    assert task.generate("train", 20, 3) == task.generate("train", 40, 3)[:20]
    assert task.generate("train", 20, 3) != task.generate("train", 20, 4)
    assert len({row["prompt"] for row in task.generate("heldout", 512, 0)}) == 512


@pytest.mark.parametrize("name", task_names())
def test_rows_fit_the_alphabet_and_the_completion_length(name):
    task = get_task(name)
    for row in task.generate("train", 200, 0):
        assert set(row["prompt"] + row["answer"]) <= set(task.alphabet)
        assert len(row["answer"]) + 1 <= task.max_completion_tokens


def test_sorted_digits_are_the_prompts_digits_in_order():
    for row in get_task("sort_digits").generate("heldout", 100, 0):
        digits = row["prompt"].removesuffix(">")
        assert 8 <= len(digits) <= 14
        assert sorted(digits) == list(row["answer"])


def test_reverse_digits_and_distinct_digits_say_what_they_should():
    for row in get_task("reverse_digits").generate("heldout", 100, 0):
        assert row["answer"] == "".join(reversed(row["prompt"].removesuffix("-")))
    for row in get_task("distinct_digits").generate("heldout", 100, 0):
        digits = row["prompt"].removesuffix("*")
        assert row["answer"] == "".join(digit for digit in "0123456789" if digit in digits)


def test_running_sum_adds_each_digit_to_the_one_before():
    for row in get_task("running_sum").generate("heldout", 100, 0):
        digits = [int(digit) for digit in row["prompt"].removesuffix("=")]
        assert 6 <= len(digits) <= 8
        assert row["answer"] == "".join(str(sum(digits[: i + 1]) % 10) for i in range(len(digits)))


def test_reward_is_exact_and_silent_without_an_answer():
    rewards = exact_match(["p"] * 4, ["12", "21", "12 ", "1"], answer=["12", "12", "12", None], other=[0] * 4)
    assert rewards == [1.0, 0.0, 0.0, None]


def test_reward_reads_chat_completions():
    chat = [{"role": "assistant", "content": "12"}]
    assert completion_text(chat) == "12"
    assert exact_match([[{"role": "user", "content": "21>"}]], [chat], [[4, 5]], answer=["12"]) == [1.0]


def test_reward_refuses_columns_of_another_length():
    with pytest.raises(ValueError, match="zip"):
        exact_match(["p"], ["1"], answer=["1", "2"])


@pytest.mark.parametrize("name", task_names())
def test_tasks_pickle(name):
    task = get_task(name)
    assert pickle.loads(pickle.dumps(task)).generate("train", 3, 0) == task.generate("train", 3, 0)


def _two_prompts(rng):
    return rng.choice("ab"), ""


@pytest.mark.parametrize(("split", "count", "error"), [("test", 1, ConfigError), ("train", 0, ConfigError)])
def test_bad_arguments_are_refused(split, count, error):
    with pytest.raises(error):
        get_task("sort_digits").generate(split, count, 0)


def test_a_small_task_says_how_many_prompts_it_has():
    task = Task("two", "", _two_prompts, "ab", 1, (exact_match,))
    with pytest.raises(DataError, match="'two' has only"):
        task.generate("train", 3, 0)
