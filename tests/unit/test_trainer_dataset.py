"""Prompt order, prompt tokens, and reward functions that misbehave."""

import asyncio
import pickle
import sys
import time

import numpy as np
import pytest
import torch
from datasets import Dataset
from trainer_stub import ROWS, tokenizer

from grpo_lab.errors import ConfigError, DataError, RewardError
from grpo_lab.trainer.dataset import PromptSequence, RewardFunctions, check_dataset, prompt_token_ids
from grpo_lab.types import CursorState


class Decoder:
    chat_template = "{{ messages }}"

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(96 + token) for token in ids)

    def apply_chat_template(self, messages, tokenize, return_dict, add_generation_prompt, **options):
        if options.get("fail"):
            raise ValueError("no such option")
        return [len(message["content"]) for message in messages] + [99] * add_generation_prompt


def test_a_pass_has_every_row_once_in_its_own_order():
    prompts = PromptSequence(ROWS, tokenizer, seed=3)
    first = [prompts.next() for _ in ROWS]
    second = [prompts.next() for _ in ROWS]
    assert [index for index, _, _ in first + second] == list(range(2 * len(ROWS)))
    for passes in (first, second):
        assert sorted(row["answer"] for *_, row in passes) == sorted(row["answer"] for row in ROWS)
    assert [row for *_, row in first] != [row for *_, row in second]
    other = PromptSequence(ROWS, tokenizer, seed=4)
    assert [other.next()[2] for _ in ROWS] != [row for *_, row in first]


def test_a_resumed_sequence_names_the_same_prompts_and_skips_only_done_ones():
    straight = PromptSequence(ROWS, tokenizer, seed=3)
    rows = {index: row for index, _, row in (straight.next() for _ in range(90))}
    resumed = PromptSequence(ROWS, tokenizer, seed=3, done=CursorState(low_water=38, done=(39, 41)))
    got = [resumed.next() for _ in range(6)]
    assert [index for index, _, _ in got] == [38, 40, 42, 43, 44, 45]
    assert all(rows[index] == row for index, _, row in got)


def test_it_pickles_and_reads_datasets():
    prompts = pickle.loads(pickle.dumps(PromptSequence(Dataset.from_list(ROWS), tokenizer, seed=0)))
    assert prompts.next()[2] == PromptSequence(ROWS, tokenizer, seed=0).next()[2]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ([{"question": "a", "answer": "b"}], "its columns are 'question', 'answer'"),
        (Dataset.from_list([{"text": "a"}]), "its columns are 'text'"),
        ([], "no rows"),
        (["a", "b"], "not dictionaries"),
        ((row for row in ROWS), "random access"),
        (None, "NoneType"),
    ],
)
def test_datasets_that_cannot_be_used_say_why(dataset, words):
    with pytest.raises(DataError, match=words):
        check_dataset(dataset)


def test_chat_prompts_go_through_the_template():
    chat = [{"role": "user", "content": "abc"}]
    assert prompt_token_ids(chat, Decoder()) == (3, 99)
    started = [*chat, {"role": "assistant", "content": "x"}]
    assert prompt_token_ids(started, Decoder()) == (3, 1)
    assert prompt_token_ids(chat, Decoder(), {"add_generation_prompt": False}) == (3,)
    with pytest.raises(DataError, match="no such option"):
        prompt_token_ids(chat, Decoder(), {"fail": True})


@pytest.mark.parametrize("prompt", [None, 3, [], ["a"], [{"content": "a"}], ""])
def test_prompts_of_other_forms_are_refused(prompt):
    with pytest.raises(DataError):
        prompt_token_ids(prompt, tokenizer)


def test_a_prompt_that_leaves_no_room_is_refused():
    with pytest.raises(DataError, match="has 3 tokens"):
        PromptSequence(ROWS, tokenizer, seed=0, max_prompt_tokens=2).next()


def score(*functions, row=None, completions=((1, 2), (3,)), **options):
    rewards = RewardFunctions(list(functions), Decoder(), **options)
    return asyncio.run(rewards.score(row or {"prompt": "q", "answer": "x"}, completions))


def test_functions_are_called_in_trls_style():
    seen = {}

    def reward(prompts, completions, completion_ids, answer, **columns):
        seen.update(locals())
        return [1, 0.5]

    assert score(reward) == [(1.0, (1.0,)), (0.5, (0.5,))]
    assert seen["prompts"] == ["q", "q"]
    assert seen["completions"] == ["ab", "c"]
    assert seen["completion_ids"] == [[1, 2], [3]]
    assert seen["answer"] == ["x", "x"]
    chat = {"prompt": [{"role": "user", "content": "q"}], "answer": "x"}
    score(reward, row=chat)
    assert seen["completions"][1] == [{"role": "assistant", "content": "c"}]


def test_weights_none_arrays_and_coroutines():
    async def slow(completions, **_):
        await asyncio.sleep(0)
        return [None, 2.0]

    def array(completions, **_):
        return np.array([1.0, 3.0])

    def tensor(completions, **_):
        return torch.tensor([0.5, 0.0])

    assert score(slow, array, tensor, weights=[1.0, 10.0, 2.0]) == [
        (11.0, (None, 1.0, 0.5)),
        (32.0, (2.0, 3.0, 0.0)),
    ]
    assert score(lambda **_: [None, None]) == [(None, (None,)), (None, (None,))]


class AsyncReward:
    async def __call__(self, completions, **_):
        return [1.0] * len(completions)


def test_an_object_with_an_async_call_is_awaited():
    assert score(AsyncReward())[0][0] == 1.0


def raising(**_):
    raise KeyError("answer")


def timing_out(**_):
    raise TimeoutError("their own")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        (1.0, "returned float, not a list"),
        (None, "returned NoneType"),
        ({"a": 1}, "returned dict"),
        ([1.0, float("nan")], "nan for completion 1"),
        ([float("inf"), 0.0], "inf for completion 0"),
        ([True, 0.0], "True for completion 0"),
        (["1", 0.0], "'1' for completion 0"),
        ([[1.0], [0.0]], "completion 0"),
    ],
)
def test_wrong_results_name_the_function(result, words):
    def careless(**_):
        return result

    with pytest.raises(RewardError, match="reward function careless") as caught:
        score(careless)
    assert words in str(caught.value)


def test_exceptions_name_the_function():
    with pytest.raises(RewardError, match=r"reward function raising raised KeyError\('answer'\)"):
        score(raising)
    with pytest.raises(RewardError, match="reward function timing_out raised TimeoutError"):
        score(timing_out)


def test_a_function_that_exits_costs_its_group_alone():
    def leaving(**_):
        sys.exit(5)

    with pytest.raises(RewardError, match=r"reward function leaving raised SystemExit\(5\)"):
        score(leaving)


def test_a_slow_function_is_bounded_and_does_not_stop_the_loop():
    def sleeping(**_):
        time.sleep(0.3)
        return [0.0, 0.0]

    began = time.monotonic()
    with pytest.raises(RewardError, match=r"sleeping gave nothing within 0\.05 s"):
        score(sleeping, timeout_s=0.05)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(("functions", "weights"), [([], None), (["f"], None), ([raising], [1.0, 2.0])])
def test_functions_and_weights_must_fit(functions, weights):
    with pytest.raises(ConfigError):
        RewardFunctions(functions, Decoder(), weights)
