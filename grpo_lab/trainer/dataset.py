"""Prompts in a seeded, endless order, and reward functions in TRL's calling style.

Both are plain objects that pickle (if the reward functions do): the rollout worker's process uses them.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_lab.errors import ConfigError, DataError, RewardError
from grpo_lab.types import CursorState, JsonDict

RewardFunction = Callable[..., Any]


def check_dataset(dataset: Any) -> None:
    """Refuses anything that is not a sized, indexable data set with a ``prompt`` column.

    Raises:
        DataError: naming the columns that there are.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"train_dataset is a {type(dataset).__name__}: a data set with a length and random access is "
            "needed (a resumed run goes on at a prompt's index), not a stream"
        )
    if len(dataset) == 0:
        raise DataError("train_dataset has no rows; at least one prompt is needed")
    first = dataset[0]
    if not isinstance(first, Mapping):
        raise DataError(f"train_dataset's rows are of type {type(first).__name__}, not dictionaries")
    if "prompt" not in first:
        raise DataError(
            f"train_dataset has no column 'prompt'; its columns are {', '.join(map(repr, first))}. "
            "Rename the one that holds the prompts"
        )


def prompt_token_ids(
    prompt: Any, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
    """Token ids of a prompt: plain text as it is, a list of chat messages through the chat template.

    Raises:
        DataError: a prompt of another type, without tokens, or a template that cannot render it.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif is_chat(prompt):
        options = {"add_generation_prompt": prompt[-1].get("role") != "assistant"}
        options |= dict(chat_template_kwargs or {})
        try:
            ids = tokenizer.apply_chat_template(list(prompt), tokenize=True, return_dict=False, **options)
        except Exception as error:
            raise DataError(f"the chat template cannot render {prompt!r}: {error}") from error
    else:
        raise DataError(
            f"a prompt is {type(prompt).__name__} ({str(prompt)[:80]!r}); it must be a string or a list of "
            "{'role': ..., 'content': ...} messages"
        )
    if not ids:
        raise DataError(f"the prompt {prompt!r} has no tokens")
    return tuple(int(token) for token in ids)


def is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and bool(prompt)
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


class PromptSequence:
    """The endless prompt sequence: pass after pass over the data, each in its own seeded order.

    Prompt index i is row ``order(i // n)[i % n]`` of n rows, where the order of pass e depends on
    ``seed`` and e only. So an index names the same prompt in every process and after every resume.

    >>> rows = [{"prompt": "a"}, {"prompt": "b"}]
    >>> tokenizer = lambda text: {"input_ids": [ord(text)]}
    >>> prompts = PromptSequence(rows, tokenizer, seed=0, done=CursorState(low_water=1, done=(2,)))
    >>> [prompts.next()[0] for _ in range(3)]
    [1, 3, 4]
    """

    def __init__(
        self,
        dataset: Any,
        tokenizer: Any,
        seed: int,
        done: CursorState = CursorState(),  # noqa: B008 - frozen
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_prompt_tokens: int | None = None,
    ) -> None:
        check_dataset(dataset)
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._seed = seed
        self._template = chat_template_kwargs
        self._limit = max_prompt_tokens
        self._next = done.low_water
        self._done = frozenset(done.done)
        self._order: tuple[int, list[int]] = (-1, [])

    def next(self) -> tuple[int, tuple[int, ...], JsonDict]:
        """The next (prompt index, prompt token ids, row) that is not done yet. Raises ``DataError``."""
        while self._next in self._done:
            self._next += 1
        index = self._next
        row = self.row(index)
        ids = prompt_token_ids(row["prompt"], self._tokenizer, self._template)
        if self._limit is not None and len(ids) > self._limit:
            raise DataError(
                f"prompt {index} has {len(ids)} tokens, but token_budget - max_completion_length leaves "
                f"{self._limit}; raise token_budget or remove long prompts"
            )
        self._next += 1
        return index, ids, row

    def row(self, index: int) -> JsonDict:
        """The data set's row at a prompt index."""
        passes, place = divmod(index, len(self._dataset))
        if self._order[0] != passes:
            order = list(range(len(self._dataset)))
            random.Random(f"prompts/{self._seed}/{passes}").shuffle(order)
            self._order = (passes, order)
        return dict(self._dataset[self._order[1][place]])


class RewardFunctions:
    """Scores completions with one or more reward functions and adds them up.

    Each function is called as ``function(prompts=..., completions=..., completion_ids=..., **columns)``
    with one entry per completion, and returns a number or None for each. Completions of a chat prompt
    are passed as ``[{"role": "assistant", "content": text}]``. Coroutine functions are awaited; others run
    in a thread, so that a slow one does not stop the event loop (``in_thread=False``: they run in place).
    """

    def __init__(
        self,
        functions: RewardFunction | Sequence[RewardFunction],
        tokenizer: Any,
        weights: Sequence[float] | None = None,
        timeout_s: float = 300.0,
        in_thread: bool = True,
    ) -> None:
        self.functions = tuple(functions) if isinstance(functions, Sequence) else (functions,)
        if not self.functions or not all(map(callable, self.functions)):
            raise ConfigError("reward_funcs", functions, "one callable or a non-empty list of callables")
        self.weights = tuple(weights) if weights is not None else (1.0,) * len(self.functions)
        if len(self.weights) != len(self.functions):
            expected = f"one weight for each of the {len(self.functions)} reward functions"
            raise ConfigError("reward_weights", weights, expected)
        self._tokenizer = tokenizer
        self._timeout_s = timeout_s
        self._in_thread = in_thread

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(_name(function) for function in self.functions)

    async def score(
        self, row: JsonDict, completions: Sequence[tuple[int, ...]]
    ) -> list[tuple[float | None, tuple[float | None, ...]]]:
        """Weighted total and each function's own value, for every completion of one prompt.

        The total leaves out functions that returned None; it is None when all did.

        Raises:
            RewardError: a function raised, took too long, or returned something else than one finite
                number or None per completion.
        """
        arguments = self._arguments(row, completions)
        columns = [await self._call(function, arguments, len(completions)) for function in self.functions]
        rows = list(zip(*columns, strict=True))
        return [(self._total(values), values) for values in rows]

    def texts(self, row: JsonDict, completions: Sequence[tuple[int, ...]]) -> tuple[str, list[str]]:
        """The prompt, and the completions as reward functions see them, for people to read."""
        prompt = row["prompt"]
        shown = (
            "\n".join(f"{part['role']}: {part.get('content')}" for part in prompt)
            if is_chat(prompt)
            else prompt
        )
        return str(shown), self._decode(completions)

    def _decode(self, completions: Sequence[tuple[int, ...]]) -> list[str]:
        return [self._tokenizer.decode(list(ids), skip_special_tokens=True) for ids in completions]

    def _total(self, values: tuple[float | None, ...]) -> float | None:
        known = [
            weight * value for weight, value in zip(self.weights, values, strict=True) if value is not None
        ]
        return math.fsum(known) if known else None

    def _arguments(self, row: JsonDict, completions: Sequence[tuple[int, ...]]) -> JsonDict:
        count = len(completions)
        texts = self._decode(completions)
        chat = is_chat(row["prompt"])
        columns = {name: [value] * count for name, value in row.items() if name != "prompt"}
        return columns | {
            "prompts": [row["prompt"]] * count,
            "completions": [[{"role": "assistant", "content": text}] for text in texts] if chat else texts,
            "completion_ids": [list(ids) for ids in completions],
        }

    async def _call(
        self, function: RewardFunction, arguments: JsonDict, count: int
    ) -> tuple[float | None, ...]:
        try:
            async with asyncio.timeout(self._timeout_s) as scope:
                if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
                    getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
                ):
                    result = await function(**arguments)
                elif self._in_thread:
                    result = await asyncio.to_thread(function, **arguments)
                else:
                    result = function(**arguments)
        except (Exception, SystemExit) as error:  # sys.exit() in a reward would end the worker's loop
            if scope.expired():
                message = f"reward function {_name(function)} gave nothing within {self._timeout_s:g} s"
                raise RewardError(f"{message}; raise reward_timeout or make it faster") from error
            raise RewardError(f"reward function {_name(function)} raised {error!r}") from error
        return _checked(result, _name(function), count)


def _checked(result: Any, name: str, count: int) -> tuple[float | None, ...]:
    if hasattr(result, "tolist"):  # a tensor or an array
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise RewardError(f"reward function {name} returned {type(result).__name__}, not a list of rewards")
    if len(result) != count:
        raise RewardError(f"reward function {name} returned {len(result)} rewards for {count} completions")
    return tuple(_number(value, name, place) for place, value in enumerate(result))


def _number(value: Any, name: str, place: int) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(
            f"reward function {name} returned {value!r} for completion {place}; "
            "a reward is a finite number or None"
        )
    return float(value)


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)
