"""A sequence's tokens as text and logprobs, piece by piece, in the words of vLLM's answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_lab.engine.parameters import Parameters
from grpo_lab.engine.request import Request
from grpo_lab.engine.text import Text
from grpo_lab.errors import ModelError

FLOOR = -9999.0  # vLLM's stand-in for a logprob of minus infinity
Entry = tuple[int, float, int]  # token, logprob, rank


class Transcript:
    """The text of one sequence as it grows. ``taken`` tokens were read; ``delta`` says each character once.

    A token that ended the sequence by its id is no text, and neither is a stop string, unless asked for;
    characters that may begin a stop string are held back until that is certain.
    """

    def __init__(self, request: Request, text: Text | None, parameters: Parameters) -> None:
        self.request = request
        self.taken = 0
        self.text = ""
        self._told = 0
        self._stops, self._include_stop = parameters.stops, parameters.include_stop
        self._hold = max((len(stop) for stop in self._stops), default=1) - 1 if not self._include_stop else 0
        try:
            self._read = text.stream(request.prompt_token_ids, parameters.skip_special) if text else None
        except ModelError:
            self._read = None

    @property
    def finished(self) -> bool:
        return self.request.finish_reason is not None

    def take(self) -> range:
        """Reads the tokens that are new; their places in the output."""
        request = self.request
        first, last = self.taken, request.num_output_tokens
        tokens = request.token_ids[request.num_prompt_tokens + first : request.num_prompt_tokens + last]
        silent = self._ends_by_token()
        if self._read is not None:
            for index, token in enumerate(tokens, first):
                if not (silent and index == last - 1):
                    self.text += self._read(token)
            self._cut()
        self.taken = last
        return range(first, last)

    def delta(self) -> str:
        """The text since the last call."""
        end = len(self.text) - (0 if self.finished else self._hold)
        first, self._told = self._told, max(end, self._told)
        return self.text[first : self._told]

    def _ends_by_token(self) -> bool:
        request = self.request
        return (
            request.finish_reason == "stop"
            and not isinstance(request.stop_reason, str)
            and not self._include_stop
        )

    def _cut(self) -> None:
        stop = self.request.stop_reason
        if self.request.finish_reason == "stop" and isinstance(stop, str):
            place = self.text.find(stop)
            if place >= 0:
                self.text = self.text[: place + len(stop) * self._include_stop]


def entries(request: Request, index: int, top: int) -> list[Entry]:
    """Output token ``index`` and the likeliest there: the drawn one first, then in order of rank."""
    token = request.token_ids[request.num_prompt_tokens + index]
    likely = request.top[index] if request.top else []
    rank = request.ranks[index] if request.ranks else 1
    return _with_rest(token, request.logprobs[index], rank, likely, top)


def prompt_entries(request: Request, index: int, top: int) -> list[Entry] | None:
    """The same of prompt token ``index``; None for the first, which follows nothing."""
    scores = request.prompt_scores
    if index == 0 or scores is None or index > len(scores):
        return None
    score = scores[index - 1]
    return _with_rest(request.prompt_token_ids[index], score.logprob, score.rank, score.top, top)


def _with_rest(
    token: int, logprob: float, rank: int, likely: Sequence[tuple[int, float]], top: int
) -> list[Entry]:
    rest = [(t, p, place) for place, (t, p) in enumerate(likely, 1) if t != token]
    return [(token, logprob, rank), *(rest if top else [])]


def clamped(logprob: float) -> float:
    """JSON has no minus infinity. A NaN stays one, and makes the answer a 400, as in vLLM."""
    return max(logprob, FLOOR)


class Scribe:
    """Writes logprobs in the three forms that vLLM's routes have. ``as_ids`` replaces text by token ids."""

    def __init__(self, text: Text | None, as_ids: bool = False) -> None:
        self._text, self._as_ids = text, as_ids

    def piece(self, token: int, before: Sequence[int]) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        if self._text is None:
            return ""
        try:
            return self._text.piece(token, before)
        except ModelError:
            return ""

    def completion(
        self, rows: Sequence[tuple[list[Entry] | None, Sequence[int], int]], top: int, offset: int = 0
    ) -> tuple[dict[str, Any], int]:
        """OpenAI's completion logprobs of (entries, tokens before, token) rows, and the next text offset."""
        offsets, tokens, values, likely = [], [], [], []
        for found, before, token in rows:
            piece = self.piece(token, before)
            offsets.append(offset)
            offset += len(piece)
            tokens.append(piece)
            values.append(None if found is None else clamped(found[0][1]))
            shown = found if found is None or top < 0 else found[: top + 1]
            likely.append(None if shown is None else {self.piece(t, before): clamped(p) for t, p, _ in shown})
        body = {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": likely,
        }
        return body, offset

    def chat(self, request: Request, places: range, top: int) -> dict[str, Any]:
        content = []
        for index in places:
            before = request.token_ids[: request.num_prompt_tokens + index]
            found = entries(request, index, top)
            row = self._chat_token(found[0], before)
            shown = found if top < 0 else found[:top]
            row["top_logprobs"] = [self._chat_token(entry, before) for entry in shown]
            content.append(row)
        return {"content": content}

    def _chat_token(self, entry: Entry, before: Sequence[int]) -> dict[str, Any]:
        piece = self.piece(entry[0], before)
        return {"token": piece, "logprob": clamped(entry[1]), "bytes": list(piece.encode("utf-8", "replace"))}

    def prompt(self, request: Request, top: int | None) -> list[dict[str, Any] | None] | None:
        """Logprobs of the prompt; None when nobody asked."""
        if top is None or request.prompt_scores is None:
            return None
        ids, rows = request.prompt_token_ids, []
        for index in range(len(ids)):
            found = prompt_entries(request, index, top)
            before = ids[:index]
            rows.append(
                None
                if found is None
                else {
                    str(token): {
                        "logprob": clamped(value),
                        "rank": rank,
                        "decoded_token": self.piece(token, before),
                    }
                    for token, value, rank in found
                }
            )
        return rows


def output_rows(
    request: Request, places: Sequence[int], top: int
) -> list[tuple[list[Entry], Sequence[int], int]]:
    """Rows for ``Scribe.completion``; context before a token is the output alone, as in vLLM."""
    output = request.output_token_ids
    return [(entries(request, index, top), output[:index], output[index]) for index in places]


def prompt_rows(request: Request, top: int) -> list[tuple[list[Entry] | None, Sequence[int], int]]:
    ids = request.prompt_token_ids
    return [(prompt_entries(request, index, top), ids[:index], token) for index, token in enumerate(ids)]
