"""A synchronous GRPO loop, twice: behind the trainer's public seam, and written out by hand.

``InlineWorker`` generates a group at the moment that the trainer asks for it, in the trainer's own
process and with its own engine policy. ``losses_by_hand`` shares nothing with the trainer but the data.
Both refit after every ``k`` optimizer steps; ``versions_behind`` plants the bug of an older policy.
"""

import asyncio
import copy
import queue

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from grpo_lab.engine.policy import load
from grpo_lab.engine.request import Request, Scheduled, sample_key
from grpo_lab.engine.torch_policy import BLOCK_TOKENS, TorchPolicy
from grpo_lab.protocol.rollout_worker import sample_seed
from grpo_lab.trainer.dataset import PromptSequence, RewardFunctions
from grpo_lab.types import RolloutGroup, RolloutSample, SamplingParams, VersionSpan


def even_share(prompts, completions, completion_ids, **columns):
    """A reward that an untrained model gets some of: the share of tokens with an even id."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


class InlineWorker:
    """Behind ``RolloutWorkerProtocol``; it is its own buffer. ``get`` generates the next group.

    Before the first group of every k-th step it copies the trainer's weights, and generates with those of
    ``versions_behind`` copies ago (the oldest that there is).
    """

    def __init__(self, recipe, model_path, dataset, tokenizer, versions_behind=0):
        self.recipe = recipe
        self.policy = TorchPolicy(model_path, batch_invariant=True)
        self.prompts = PromptSequence(dataset, tokenizer, recipe.seed)
        self.rewards = RewardFunctions(even_share, tokenizer, in_thread=False)
        self.versions_behind = versions_behind
        self.copies = []
        self.number = 0
        self.version = 0
        self.model = None  # the trainer's, once there is one
        self.running = False
        self.rollout_buffer = self

    def start(self):
        self.running = True

    def stop(self):
        self.running = False

    def update_model_version(self, version):
        self.version = version

    def get(self, block=True, timeout=None):
        if not self.running:
            raise queue.Empty
        if self.number % (self.recipe.prompts_per_step * self.recipe.weight_sync_steps) == 0:
            self._refit()
        group = self._group()
        self.number += 1
        return group

    def _refit(self):
        self.copies.append({name: tensor.clone() for name, tensor in self.model.state_dict().items()})
        load(self.policy, self.copies[max(0, len(self.copies) - 1 - self.versions_behind)])

    def _group(self):
        index, prompt, row = self.prompts.next()
        drawn = [self._sample(prompt, index, place) for place in range(self.recipe.num_generations)]
        scores = asyncio.run(self.rewards.score(row, [tokens for tokens, _ in drawn]))
        samples = tuple(
            RolloutSample(
                sample_id=f"g{self.number}.s{place}",
                prompt_token_ids=prompt,
                completion_token_ids=tokens,
                behaviour_logprobs=logprobs,
                reward=total,
                version_first=self.version,
                version_last=self.version,
                spans=(VersionSpan(1, self.version, 0, len(tokens)),),
                rewards=each,
            )
            for place, ((tokens, logprobs), (total, each)) in enumerate(zip(drawn, scores, strict=True))
        )
        return RolloutGroup(f"g{self.number}", self.number, index, 1, samples, self.version)

    def _sample(self, prompt, prompt_index, place):
        """One completion, token by token: the whole prompt first, then each drawn token."""
        seed = sample_seed(self.recipe.seed, prompt_index, place)
        most = self.recipe.max_completion_length
        request = Request(
            request_id="",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=most, temperature=self.recipe.temperature, seed=seed),
            done=None,
            sample_key=sample_key(self.recipe.seed, "", seed),
            block_table=list(range(-(-(len(prompt) + most) // BLOCK_TOKENS))),
        )
        done = 0
        while request.num_output_tokens < most:
            output = self.policy.step([Scheduled(request, done, len(request.token_ids) - done)])
            done = len(request.token_ids)
            request.token_ids.append(output.token_ids[0])
            request.logprobs.append(output.logprobs[0])
            if output.token_ids[0] in self.policy.eos_token_ids:
                break
        return tuple(request.output_token_ids), tuple(request.logprobs)


def losses_by_hand(recipe, model_path, steps, versions_behind=0, cap=2.0):
    """The losses of a synchronous loop that draws the recorded tokens.

    Plain padded forward passes, advantages, token-mean loss with truncated importance weights, gradient
    clipping and AdamW, as the papers have them. The sampling policy is this loop's own copy of the model.

    Args:
        steps: for each optimizer step its groups of (prompt ids, completion ids, reward) triples.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0
    )
    copies, losses = [], []
    for number, groups in enumerate(steps):
        if number % recipe.weight_sync_steps == 0:
            copies.append(copy.deepcopy(model).eval())
        sampler = copies[max(0, len(copies) - 1 - versions_behind)]
        tokens = sum(len(completion) for group in groups for _, completion, _ in group)
        loss = torch.zeros(())
        for group in groups:
            rewards = torch.tensor([reward for _, _, reward in group], dtype=torch.float64)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            with torch.no_grad():
                drawn_with = _completion_logprobs(sampler, group)
            now = _completion_logprobs(model, group)
            for row, before, advantage in zip(now, drawn_with, advantages.tolist(), strict=True):
                weight = (row.detach() - before).exp().clamp(max=cap)
                loss = loss - advantage * (weight * (row - row.detach()).exp()).sum() / tokens
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _completion_logprobs(model, group):
    """Of each completion's tokens; one row a sample, padded to the right for the model only."""
    rows = [[*prompt, *completion] for prompt, completion, _ in group]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    logprobs = functional.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None])[..., 0]
    return [
        logprobs[place, len(prompt) - 1 : len(prompt) + len(completion) - 1]
        for place, (prompt, completion, _) in enumerate(group)
    ]
