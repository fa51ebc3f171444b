"""Settings of ``AsyncGRPOTrainer``. A value that cannot work is refused here, by field, range and fix."""

from __future__ import annotations

# ruff: noqa: RUF009 - setting() is dataclasses.field() with a rule
import dataclasses
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from grpo_lab.algorithms.corrections import CORRECTIONS
from grpo_lab.algorithms.losses import LOSSES
from grpo_lab.algorithms.objectives import OBJECTIVES, surrogate_name
from grpo_lab.errors import ConfigError
from grpo_lab.protocol.admission import StalenessBound
from grpo_lab.protocol.timeouts import Timeouts
from grpo_lab.trainer.rules import (
    Choice,
    Either,
    Exactly,
    Flag,
    Integer,
    ListOf,
    Mapping,
    Number,
    Optional,
    Rule,
    Text,
    Urls,
    setting,
    split_urls,
)

_SECONDS = Number(0, 86_400, open_low=True)
_WIRE_DTYPES = ("float32", "float16", "bfloat16")

# What transformers' own fields may be here. Fields that are not named keep transformers' meaning.
INHERITED_RULES: dict[str, Rule] = {
    "per_device_train_batch_size": Integer(1),
    "gradient_accumulation_steps": Exactly(
        (1,), "a step is split by token_budget; for larger steps raise per_device_train_batch_size"
    ),
    "max_steps": Either(Exactly((-1,), "count by num_train_epochs"), Integer(1)),
    "num_train_epochs": Number(0, open_low=True),
    "learning_rate": Number(0),
    "weight_decay": Number(0),
    "max_grad_norm": Number(0),
    "adam_beta1": Number(0, 1),
    "adam_beta2": Number(0, 1),
    "adam_epsilon": Number(0, open_low=True),
    "warmup_steps": Number(0),
    "seed": Integer(0, 2**32 - 1),
    "logging_steps": Number(0, open_low=True),
    "save_steps": Number(0, open_low=True),
    "save_total_limit": Optional(Integer(1)),
    "ddp_timeout": Integer(1),
    "auto_find_batch_size": Exactly((False,), "token_budget bounds the memory of a pass"),
    "load_best_model_at_end": Exactly((False,), "no evaluation decides which model is best"),
    "label_smoothing_factor": Exactly((0.0, 0), "a policy gradient has no labels"),
    "deepspeed": Exactly((None,), "data parallelism by DDP is what is supported"),
    "fsdp": Exactly((None, "", False), "data parallelism by DDP is what is supported"),
    "eval_strategy": Choice("no"),
    "save_strategy": Choice("no", "steps"),
    "logging_strategy": Choice("no", "steps"),
}


@dataclass
class AsyncGRPOConfig(TrainingArguments):
    """Settings of asynchronous GRPO, on top of ``transformers.TrainingArguments``.

    An optimizer step consumes ``per_device_train_batch_size`` completions a rank, that is
    ``groups_per_step`` whole groups of ``num_generations`` over all ranks.

    Raises:
        ConfigError: any value outside its range, at construction.
    """

    # transformers' fields with other defaults
    learning_rate: float = setting(1e-6, INHERITED_RULES["learning_rate"], "Initial learning rate.")
    logging_steps: float = setting(10, INHERITED_RULES["logging_steps"], "Log every so many steps.")
    remove_unused_columns: bool = setting(
        False, Exactly((False,), "the other columns go to the reward functions"), "Must stay off."
    )
    ddp_find_unused_parameters: bool | None = setting(
        False, Optional(Flag()), "Every parameter takes part in every step, so nothing is searched for."
    )
    ignore_data_skip: bool = setting(
        True, Exactly((True,), "a prompt cursor says where to go on"), "Must stay on."
    )
    model_init_kwargs: dict[str, Any] | None = setting(
        None, Optional(Mapping()), "Arguments of from_pretrained when the model is given as a path."
    )

    # rollouts
    num_generations: int = setting(8, Integer(2), "Completions sampled for each prompt: a group.")
    max_completion_length: int = setting(256, Integer(1), "Most tokens of a completion.")
    temperature: float = setting(1.0, Number(0, 100, open_low=True), "Sampling temperature.")
    top_p: float = setting(1.0, Number(0, 1, open_low=True), "Nucleus of the sampled distribution; 1: all.")
    top_k: int = setting(0, Integer(0), "Sample from the k likeliest tokens; 0: from all.")
    chat_template_kwargs: dict[str, Any] | None = setting(
        None, Optional(Mapping()), "Passed to the chat template, for example {'enable_thinking': false}."
    )
    generation_seed: int | None = setting(
        None, Optional(Integer(0, 2**32 - 1)), "Seed of prompts' order and of sampling; None: seed."
    )
    max_inflight_tasks: int = setting(256, Integer(1), "Most completion requests under way.")
    queue_maxsize: int = setting(1024, Integer(1), "Groups that the queue to the trainer holds.")

    # loss
    loss_type: str = setting(
        "dapo",
        Choice(*LOSSES),
        "How tokens are averaged; gspo and cispo bring their own importance ratio, and take no correction.",
    )
    correction: str = setting(
        "none",
        Choice(*CORRECTIONS),
        "Off-policy correction: none holds the ratio at 1; tis truncates importance weights, mis masks large "
        "ones of sequences, icepop masks tokens outside a band, decoupled leaves them as they are; clip is "
        "PPO's clipped ratio on the behaviour policy.",
    )
    epsilon: float = setting(0.2, Number(0, 1, open_low=True), "Lower clip bound of clip and gspo.")
    epsilon_high: float | None = setting(
        None, Optional(Number(0, open_low=True)), "Upper clip bound of clip, gspo and cispo; None: epsilon."
    )
    delta: float | None = setting(
        None,
        Optional(Number(0, open_low=True)),
        "Largest ratio of correction=clip where the advantage is negative; None: no bound.",
    )
    tis_cap: float = setting(2.0, Number(0, open_low=True), "Largest importance weight of correction=tis.")
    mis_cap: float = setting(2.0, Number(0, open_low=True), "Largest sequence weight of correction=mis.")
    icepop_low: float = setting(0.5, Number(0), "Smallest ratio that correction=icepop keeps.")
    icepop_high: float = setting(5.0, Number(0, open_low=True), "Largest ratio that correction=icepop keeps.")
    scale_rewards: str = setting(
        "group", Choice("group", "batch", "none"), "Whose standard deviation advantages are divided by."
    )
    advantage_epsilon: float = setting(1e-4, Number(0, open_low=True), "Added to that standard deviation.")
    reward_weights: list[float] | None = setting(
        None, Optional(ListOf(Number(-1e9, 1e9))), "A weight for each reward function; None: 1 each."
    )
    reward_timeout: float = setting(300.0, _SECONDS, "Seconds that reward functions get for a group.")
    token_budget: int = setting(16_384, Integer(2), "Most tokens of one forward-backward pass on a rank.")

    # staleness
    max_staleness: int = setting(1, Integer(0), "Bound at consumption, in weight versions.")
    max_staleness_steps: int | None = setting(
        None, Optional(Integer(0)), "Bound at consumption, in optimizer steps, on top of max_staleness."
    )
    staleness_policy: str = setting(
        "admission",
        Choice("admission", "window", "drop", "freshest"),
        "admission and window hold prompts back so that nothing gets too old; drop and freshest discard.",
    )
    window: int = setting(1, Integer(1), "A group may be overtaken window - 1 times (policy window).")
    starvation_timeout: float = setting(
        600.0, _SECONDS, "Seconds without a usable group after which a waiting trainer gives up."
    )

    # weight sync
    weight_sync_steps: int = setting(1, Integer(1), "Optimizer steps between two weight syncs.")
    first_term: int = setting(
        1, Integer(1), "Raise it for engines that served another trainer: they refuse older terms."
    )
    final_sync: bool = setting(False, Flag(), "Sync once more after the last step, if it ended normally.")
    pause_mode: str = setting("keep", Choice("keep", "wait", "abort"), "What a pause does to requests.")
    clear_cache: bool = setting(True, Flag(), "Recompute the KV cache under the new weights.")
    sync_scope: str = setting(
        "global",
        Choice("global", "rolling"),
        "All engines pause and switch together, or one after another while the others generate.",
    )
    sync_attempts: int = setting(3, Integer(1, 100), "Attempts of one sync before engines are fenced.")
    min_engines: int = setting(1, Integer(1), "Fewer serving engines than this end the run.")
    weight_transport: str = setting(
        "shm", Choice("shm", "gloo", "stock"), "Shared memory (one host), gloo, or a stock vLLM's own wire."
    )
    bucket_bytes: int = setting(64 * 2**20, Integer(4096), "Size of a packed bucket.")
    ring_slots: int = setting(2, Integer(1, 64), "Buckets in flight.")
    pack_threads: int = setting(1, Integer(1, 256), "Threads of the packer.")
    wire_dtype: str | None = setting(
        None, Optional(Choice(*_WIRE_DTYPES)), "Floating-point type on the wire; None: the parameter's own."
    )
    pause_timeout: float = setting(60.0, _SECONDS, "Seconds until a pause is acknowledged.")
    sync_timeout: float = setting(120.0, _SECONDS, "Seconds until sent weights are loaded.")
    canary_tolerance: float = setting(1e-3, Number(0, open_low=True), "Largest logprob gap of a canary.")
    canary_sequences: int = setting(4, Integer(1, 1024), "Token sequences that a canary scores.")
    canary_length: int = setting(16, Integer(2), "Tokens of each.")

    # engines
    vllm_server_base_url: str | list[str] = setting(
        "http://localhost:8000", Urls(), "Address of the engine, or several: comma-separated or a list."
    )
    vllm_server_timeout: float = setting(240.0, _SECONDS, "Seconds until an engine must be up.")
    request_timeout: float = setting(600.0, _SECONDS, "Seconds for one request to an engine.")
    request_retries: int = setting(2, Integer(0, 10), "Retries of a request that got no answer, or a 5xx.")
    heartbeat_stale_after_s: float = setting(
        120.0, _SECONDS, "Seconds without progress after which the rollout worker counts as stalled."
    )

    # what is seen
    events_dir: str | None = setting(None, Optional(Text()), "Folder of the trace; None: no trace.")
    log_completions: bool = setting(False, Flag(), "Print a table of completions at every log.")
    num_completions_to_print: int | None = setting(
        None, Optional(Integer(1)), "Rows of that table; None: all of the step."
    )

    def __post_init__(self) -> None:
        for name, rule in field_rules().items():
            value = getattr(self, name)
            if not rule.allows(value):
                raise ConfigError(name, value, str(rule))
        self._check_combinations()
        super().__post_init__()  # type: ignore[no-untyped-call]
        if self.n_gpu > 1:
            raise ConfigError("n_gpu", self.n_gpu, "1 GPU a process", "Start one process a GPU (torchrun)")
        self._check_step_size()
        self.staleness_bound  # noqa: B018 - raises ConfigError for bounds that exclude each other

    @property
    def samples_per_step(self) -> int:
        """Completions that an optimizer step consumes, over all ranks."""
        return int(self.per_device_train_batch_size * self.world_size)

    @property
    def groups_per_step(self) -> int:
        return self.samples_per_step // self.num_generations

    @property
    def engine_urls(self) -> tuple[str, ...]:
        return split_urls(self.vllm_server_base_url)

    @property
    def sampling_seed(self) -> int:
        return self.seed if self.generation_seed is None else self.generation_seed

    @property
    def samples_untruncated(self) -> bool:
        """Whether logprobs of the sampled tokens can be compared with the trainer's own as they are."""
        return self.temperature == 1.0 and self.top_p == 1.0 and self.top_k == 0

    @property
    def staleness_bound(self) -> StalenessBound:
        return StalenessBound(
            policy=self.staleness_policy,  # type: ignore[arg-type]
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
            weight_sync_steps=self.weight_sync_steps,
            max_staleness_steps=self.max_staleness_steps,
            window=self.window,
        )

    @property
    def surrogate(self) -> str:
        """The correction, or the loss if it has an importance ratio of its own."""
        return surrogate_name(self.loss_type, self.correction)

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(
            connect_s=self.vllm_server_timeout,
            pause_s=self.pause_timeout,
            transfer_s=self.sync_timeout,
            finish_s=self.sync_timeout,
        )

    def _check_combinations(self) -> None:
        if self.epsilon_high is not None and self.epsilon_high < self.epsilon:
            raise ConfigError("epsilon_high", self.epsilon_high, f"at least epsilon = {self.epsilon}")
        if self.delta is not None and self.delta <= 1.0 + (self.epsilon_high or self.epsilon):
            expected = f"above 1 + epsilon_high = {1.0 + (self.epsilon_high or self.epsilon):g}"
            raise ConfigError("delta", self.delta, expected, "Below it the clip would never act")
        if self.icepop_low >= self.icepop_high:
            raise ConfigError("icepop_low", self.icepop_low, f"below icepop_high = {self.icepop_high}")
        if self.loss_type in OBJECTIVES and self.correction != "none":
            expected = f"none with loss_type={self.loss_type}"
            fix = f"{self.loss_type} has an importance ratio of its own"
            raise ConfigError("correction", self.correction, expected, fix)
        if self.surrogate != "none" and (self.top_p < 1.0 or self.top_k > 0):
            raise ConfigError(
                "correction" if self.surrogate == self.correction else "loss_type",
                self.surrogate,
                "none while top_p < 1 or top_k > 0",
                "Logprobs of a truncated distribution do not compare with the trainer's: "
                "set top_p=1 and top_k=0",
            )
        if self.max_inflight_tasks < self.num_generations:
            expected = f"at least num_generations = {self.num_generations}"
            fix = "The completions of a group are requested together"
            raise ConfigError("max_inflight_tasks", self.max_inflight_tasks, expected, fix)
        if self.token_budget < self.max_completion_length + 1:
            expected = f"at least max_completion_length + 1 = {self.max_completion_length + 1}"
            raise ConfigError("token_budget", self.token_budget, expected, "One sample must fit into a pass")
        engines = len(self.engine_urls)
        if self.min_engines > engines:
            raise ConfigError("min_engines", self.min_engines, f"at most {engines}, the number of engines")
        if self.window > 1 and self.staleness_policy != "window":
            raise ConfigError("window", self.window, f"1 with staleness_policy={self.staleness_policy!r}")

    def _check_step_size(self) -> None:
        if self.samples_per_step % self.num_generations:
            raise ConfigError(
                "per_device_train_batch_size",
                self.per_device_train_batch_size,
                f"such that all {self.world_size} ranks together ({self.samples_per_step}) take a multiple "
                f"of num_generations = {self.num_generations}",
            )
        if self.world_size > 1 and self.starvation_timeout >= self.ddp_timeout:
            raise ConfigError(
                "starvation_timeout",
                self.starvation_timeout,
                f"below ddp_timeout = {self.ddp_timeout}",
                "The other ranks wait for rank 0 no longer than that",
            )


def field_rules() -> dict[str, Rule]:
    """The rule of every field that has one, by name."""
    own = {
        item.name: item.metadata["rule"]
        for item in dataclasses.fields(AsyncGRPOConfig)
        if "rule" in item.metadata
    }
    return INHERITED_RULES | own
