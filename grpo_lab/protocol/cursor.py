"""Which prompts are done, as a low-water mark and a sparse set above it."""

from __future__ import annotations

from grpo_lab.types import CursorState


class PromptCursorLedger:
    """Counts prompts that were trained on or dropped. One slow prompt pins only itself.

    >>> ledger = PromptCursorLedger()
    >>> for index in (0, 2, 3):
    ...     ledger.acknowledge(index)
    >>> ledger.state()
    CursorState(low_water=1, done=(2, 3))
    >>> ledger.acknowledge(1)
    >>> ledger.state()
    CursorState(low_water=4, done=())
    """

    def __init__(self, state: CursorState = CursorState()) -> None:  # noqa: B008 - frozen
        self._low_water = state.low_water
        self._done = set(state.done)

    def acknowledge(self, prompt_index: int) -> None:
        """Marks a prompt as done. Raises ``ValueError`` when it already was: that would train it twice."""
        if prompt_index < self._low_water or prompt_index in self._done:
            raise ValueError(f"prompt {prompt_index} is already done (low water {self._low_water})")
        self._done.add(prompt_index)
        while self._low_water in self._done:
            self._done.remove(self._low_water)
            self._low_water += 1

    def state(self) -> CursorState:
        return CursorState(self._low_water, tuple(sorted(self._done)))
