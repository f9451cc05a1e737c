"""GRPO and SFT on the CPU against TRL: one model, the same rows in the same order, both sides by turns.

    python benchmarks/race_trl.py task=grpo,model=quickstart task=sft,model=quickstart
    python benchmarks/race_trl.py task=grpo,model=path/to/SmolLM2-135M-Instruct,data=path/to/gsm8k/train.jsonl
    python benchmarks/race_trl.py side=trl,task=sft,trl_dtype=bfloat16,pack=1024      # one side alone, to try its settings
    python benchmarks/race_trl.py side=hybridflow,profile=1                           # where our step goes, by directory

A race starts each side in a process of its own, ours, TRL's, ours, TRL's, `rounds` times, on the same number of threads,
after looking for the settings with which each is fastest (`TRIED`). Ours is a run as
`hybridflow rl` and `hybridflow sft` make it, in one process (page, batch, runtime, metrics, its reward workers), without evaluations and
saved samples; TRL's is GRPOTrainer or SFTTrainer with nothing logged and nothing saved. A model named `quickstart` is made first, as
`hybridflow quickstart` does: SFT until 40 % of the sums come out right. Rewards and lengths: see `RECIPES`. Both train every row of a step
(`drop_constant_groups=1` for what we would do by default).

Prints the fastest, median and slowest step of each side after `warm_up` steps, the main thread's own processor time of the median step,
and the median over rounds of the ratio of the sides' medians.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from cases import at_least, list_given, one_of, parse_cases, print_line
from race_reward import digits
from trl_steps import build_watch, time_trl_steps

VERSIONS = ("torch", "transformers", "trl", "accelerate", "datasets")
REWARD_FILE = Path(__file__).with_name("race_reward.py")


@dataclass(frozen=True)
class Case:
    """One race, or one side of it; see the module.

    data:          rows of GSM8K; not read for `quickstart`.
    rows, samples, response, budget: in place of the recipe's, where not 0.
    search:        whether a race first looks for the fastest settings of each side, from those given on.
    limit_s:       longest run of a side.
    work:          directory for models and runs; empty makes one that is taken away at the end.
    dtype, share:  of ours: numbers of the live weights, and whether the samples of a prompt share it in the update.
    trl_*, micro:  of TRL: its numbers, and rows that go through the model together (0: all of an update).
    paged:         TRL generates by Transformers' continuous batching.
    pack:          TRL's SFT packs rows into this many tokens, one such row an optimizer step (0: rows are padded).
    group:         TRL's SFT puts rows of like length together.
    """

    side: str = one_of("race", "hybridflow", "trl")
    task: str = one_of("grpo", "sft")
    model: str = "quickstart"
    data: str = ""
    work: str = ""
    search: int = one_of(1, 0)
    limit_s: int = 600
    rounds: int = 3
    steps: int = 20
    warm_up: int = at_least(0, 3)
    threads: int = 2
    updates: int = 1
    rows: int = 0
    samples: int = 0
    response: int = 0
    drop_constant_groups: int = one_of(0, 1)
    dtype: str = "float32"
    budget: int = 0
    share: int = one_of(1, 0)
    profile: int = one_of(0, 1)
    trl_dtype: str = "float32"
    micro: int = 0
    compile: int = one_of(0, 1)
    paged: int = one_of(0, 1)
    pack: int = 0
    padding_free: int = one_of(0, 1)
    group: int = one_of(0, 1)
    attention: str = "sdpa"
    cache: str = ""

    @property
    def recipe(self) -> Recipe:
        """What is done a step."""
        known = RECIPES["quickstart" if self.model == "quickstart" else "gsm8k"][self.task]
        own = {"rows": self.rows, "samples": self.samples, "response": self.response, "budget": self.budget}
        return dataclasses.replace(known, **{name: value for name, value in own.items() if value})

    @property
    def model_path(self) -> str:
        """The directory of the weights that both sides start from."""
        return str(Path(self.work) / "quickstart" / "model") if self.model == "quickstart" else self.model

    @property
    def data_path(self) -> str:
        """The rows."""
        return str(Path(self.work) / "sums" / "train.jsonl") if self.model == "quickstart" else self.data


@dataclass(frozen=True)
class Recipe:
    """A step. rows: prompts of GRPO, examples of SFT. budget: our micro-batches."""

    rows: int
    lr: float
    budget: int
    data: tuple[str, ...]
    samples: int = 0
    response: int = 0
    reward: str = ""
    ignore_eos: bool = False


_SUMS = ("data.response_column=answer",)
_GSM8K = ("data.format=chat", "data.prompt_column=question", "data.response_column=answer")
RECIPES = {
    "quickstart": {
        "grpo": Recipe(64, 3e-4, 8192, (), samples=8, response=5, reward="exact_match"),
        "sft": Recipe(256, 1e-3, 8192, _SUMS),
    },
    "gsm8k": {
        "grpo": Recipe(
            8, 2e-6, 2048, (*_GSM8K, "data.max_tokens=256"), samples=4, response=160, reward="digits", ignore_eos=True
        ),
        "sft": Recipe(8, 2e-5, 2048, (*_GSM8K, "data.max_tokens=512")),
    },
}
"""Those of the shipped configurations. On GSM8K responses go to their limit, and the reward is one that hardly ever gives a whole group
the same, so that both sides have the same tokens to train."""


TRIED: dict[str, dict[str, list[dict[str, Any]]]] = {
    "hybridflow": {"grpo": [{"dtype": "bfloat16"}, {"compile": 1}], "sft": [{"dtype": "bfloat16"}, {"compile": 1}]},
    "trl": {
        "grpo": [
            {"trl_dtype": "bfloat16"},
            {"attention": "eager"},
            {"micro": 16},
            {"cache": "static"},
            {"paged": 1},
            {"compile": 1},
        ],
        "sft": [
            {"trl_dtype": "bfloat16"},
            {"attention": "eager"},
            {"group": 1},
            {"micro": 4},
            {"padding_free": 1},
            {"padding_free": 0, "pack": 512},
            {"padding_free": 0, "pack": 2048},
            {"compile": 1},
        ],
    },
}
"""What `search` tries on each side, one after the other, each beside those that were kept."""


def main() -> None:
    """Runs the cases."""
    for case in parse_cases(Case):
        with _workplace(case) as placed:
            measure(placed)


@contextmanager
def _workplace(case: Case) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as directory:
        placed = dataclasses.replace(case, work=case.work or directory)
        # Of this process, and of those that it starts.
        torch.set_num_threads(case.threads)
        os.environ["OMP_NUM_THREADS"] = str(case.threads)
        if case.model == "quickstart" and not Path(placed.model_path).is_dir():
            make_quickstart_model(placed)
        yield placed


def measure(case: Case) -> None:
    """One case, printed as a line of JSON."""
    sides = {"hybridflow": run_hybridflow, "trl": run_trl, "race": race}
    given = list_given(case, always=("task", "model"))
    started_load = os.getloadavg()[0]
    found = sides[case.side](case)
    load = {"load": [round(started_load, 1), round(os.getloadavg()[0], 1)]}
    print_line({**given, **found, **load, "versions": {name: metadata.version(name) for name in VERSIONS}})


def make_quickstart_model(case: Case) -> None:
    """As `hybridflow quickstart` makes it, in `work`."""
    from hybridflow.config import load_config
    from hybridflow.flow.commands import run_sft
    from hybridflow.flow.quickstart import write_sums
    from hybridflow.flow.sft_job import SFTConfig

    files = write_sums(Path(case.work) / "sums", seed=0)
    overrides = [
        f"model.tokenizer={Path(case.work) / 'sums' / 'tokenizer'}", f"data.files=[{files['train']}]", "steps=2000",
        f"evaluation.data.files=[{files['valid']}]", f"run.directory={case.work}", "run.name=sft",
    ]  # fmt: skip
    run_sft(load_config(SFTConfig, config_name="quickstart_sft", overrides=overrides))
    (Path(case.work) / "quickstart" / "sft" / "model").rename(case.model_path)


def race(case: Case) -> dict[str, Any]:
    """Both sides by turns, each at the fastest settings found."""
    searched = {side: find_fastest(dataclasses.replace(case, side=side)) for side in TRIED}
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in TRIED}
    for _ in range(case.rounds):
        for side, rounds in found.items():
            rounds.append(run_side(searched[side][0]))
    name = "tokens_per_s" if case.task == "sft" else "steps_per_s"
    ratios = [ours[name] / theirs[name] for ours, theirs in zip(*found.values(), strict=True)]
    told = {f"{side} tried": tried for side, (_, tried) in searched.items() if tried}
    return {
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        **found,
        **told,
    }


def find_fastest(case: Case) -> tuple[Case, dict[str, str]]:
    """The settings of a side with each of `TRIED` that made more tokens a second than without it; and what each made."""
    if not case.search:
        return case, {}
    rate = run_side(case)["tokens_per_s"]
    best, told = case, {"as given": f"{rate} tokens/s"}
    for changes in TRIED[case.side][case.task]:
        tried, name = dataclasses.replace(best, **changes), " ".join(f"{key}={value}" for key, value in changes.items())
        try:
            found = run_side(tried)["tokens_per_s"]
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            told[name] = f"failed ({type(error).__name__})"
            continue
        told[name] = f"{found} tokens/s{', kept' if found > rate else ''}"
        best, rate = (tried, found) if found > rate else (best, rate)
    return best, told


def run_side(case: Case) -> dict[str, Any]:
    """A side in a process of its own. Raises CalledProcessError or TimeoutExpired if it fails."""
    words = [f"{name}={value}" for name, value in list_given(case).items()]
    command = [sys.executable, __file__, ",".join(words)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=case.limit_s)
    found = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found), file=sys.stderr, flush=True)
    names = ("steps_per_s", "tokens_per_s", "step_s", "main_thread_s", "phases_s", "reward", "tokens")
    return {name: found[name] for name in names}


def describe(case: Case, steps: list[dict[str, float]], clocks: list[float]) -> dict[str, Any]:
    """What the steps after the warm-up took. A step: its phases, `tokens` trained and the mean `reward`.

    clocks: processor seconds of the main thread at the start and after each step; they count what it does itself, not what it waits for.
    """
    measured = steps[case.warm_up :]
    names = ("rollout", "score", "update", "rest")
    phases = {name: round(statistics.median(step[name] for step in measured), 4) for name in names}
    whole = sorted(sum(step[name] for name in names) for step in measured)
    tokens = sum(step["tokens"] for step in measured)
    return {
        "steps_per_s": round(1 / statistics.median(whole), 4),
        "tokens_per_s": round(
            statistics.median(step["tokens"] / sum(step[name] for name in names) for step in measured), 1
        ),
        "step_s": [round(value, 4) for value in (whole[0], statistics.median(whole), whole[-1])],
        "phases_s": phases,
        "main_thread_s": round(
            statistics.median(map(operator.sub, clocks[case.warm_up + 1 :], clocks[case.warm_up :])), 4
        ),
        "tokens": round(tokens / len(measured), 1),
        "reward": round(statistics.mean(step["reward"] for step in measured), 4),
    }


def build_config(case: Case) -> Any:
    """The settings of our run."""
    from hybridflow.config import load_config
    from hybridflow.flow.rl_job import RLConfig
    from hybridflow.flow.sft_job import SFTConfig

    recipe = case.recipe
    overrides = [
        f"model.path={case.model_path}", f"model.dtype={case.dtype}", "model.device=cpu", f"data.files=[{case.data_path}]",
        *recipe.data, f"steps={case.steps + case.warm_up}", f"train.micro_batch_tokens={recipe.budget}",
        f"train.optimizer.lr={recipe.lr}", f"run.directory={tempfile.mkdtemp(dir=case.work)}", "run.project=race",
        "run.name=run", "run.report=false", "run.save_rollouts_every=0", "run.progress=false", f"train.share_prompts={bool(case.share)}",
        f"train.compile={bool(case.compile)}",
    ]  # fmt: skip
    if case.task == "sft":
        return load_config(SFTConfig, config_name="sft", overrides=[*overrides, f"rows_per_step={recipe.rows}"])
    overrides += [
        f"prompts_per_step={recipe.rows}", f"updates_per_step={case.updates}", f"sampling.samples_per_prompt={recipe.samples}",
        f"sampling.max_new_tokens={recipe.response}", f"sampling.ignore_eos={recipe.ignore_eos}",
        f"algorithm.drop_constant_groups={bool(case.drop_constant_groups)}",
        f"reward.function={recipe.reward if recipe.reward == 'exact_match' else f'{REWARD_FILE}:{recipe.reward}'}",
    ]  # fmt: skip
    return load_config(RLConfig, config_name="rl", overrides=overrides)


def run_hybridflow(case: Case) -> dict[str, Any]:
    """A run, and what it wrote down of itself."""
    from hybridflow.flow import rl, sft
    from hybridflow.flow.rl_job import RLJob, read_rl_inputs
    from hybridflow.flow.sft_job import SFTJob, read_sft_inputs
    from hybridflow.runtime.start import open_runtime

    page, kind, read = (sft, SFTJob, read_sft_inputs) if case.task == "sft" else (rl, RLJob, read_rl_inputs)
    clocks = [time.thread_time()]

    class Job(kind):
        """Notes the processor's time as well."""

        def close_step(self, *args: Any) -> None:
            super().close_step(*args)
            clocks.append(time.thread_time())

    config = build_config(case)
    with (
        sample_stacks(bool(case.profile)) as samples,
        open_runtime(config.runtime) as runtime,
        closing(Job(config, read(config), runtime)) as job,
    ):
        page.train(job)
    lines = Path(config.run.directory, "race", "run", "metrics.jsonl").read_text().splitlines()
    found = describe(case, [read_step(json.loads(line)) for line in lines], clocks)
    return found | (
        {"share_by_room": sum_rooms(samples, range(case.warm_up + 2, config.steps))} if case.profile else {}
    )


def read_step(values: dict[str, float]) -> dict[str, float]:
    """A step by what our run says of it; `rest` is all outside the workers' verbs."""
    phases = {name: values.get(f"time/{name}_s", 0.0) for name in ("rollout", "score", "update")}
    rest = values["time/step_s"] - sum(phases.values())
    return {**phases, "rest": rest, "tokens": values["train/tokens"], "reward": values.get("reward/mean", 0.0)}


@contextmanager
def sample_stacks(wanted: bool, interval_s: float = 1e-3) -> Iterator[Counter[tuple[int, str]]]:
    """Processor seconds of the main thread by step and by the innermost of our files on its stack, found at each tick of a clock.

    A tick that comes during a long call into C is handled when it returns, in the frame that called it; so each tick counts for the
    time since the one before it. Other work on the machine changes none of it.
    """
    from hybridflow.observability.phases import current_mark

    seconds: Counter[tuple[int, str]] = Counter()
    last_s = time.thread_time()

    def tick(_: int, frame: Any) -> None:
        nonlocal last_s
        now_s = time.thread_time()
        while frame is not None and "/hybridflow/" not in frame.f_code.co_filename:
            frame = frame.f_back
        where = "elsewhere" if frame is None else frame.f_code.co_filename.partition("/hybridflow/")[2]
        seconds[current_mark().step, where] += now_s - last_s
        last_s = now_s

    if wanted:
        signal.signal(signal.SIGALRM, tick)
        signal.setitimer(signal.ITIMER_REAL, interval_s, interval_s)
    try:
        yield seconds
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


ROOMS = {
    "page": ("flow/", "observability/", "cli/"),
    "data": ("data/",),
    "batch": ("batch", "columns.py", "readonly.py", "types.py", "roles/parts.py"),
    "runtime": ("runtime/", "roles/"),
    "rewards": ("rewards/",),
    "algorithms": ("algorithms/",),
    "rollout": ("rollout/", "weights/"),
    "training": ("train_engine/",),
    "model": ("models/",),
}


def sum_rooms(samples: Counter[tuple[int, str]], steps: range) -> dict[str, Any]:
    """Share of the time of these steps by room, the files with the most of it among page, batch and runtime, and these rooms' sum."""
    files: Counter[str] = Counter()
    for (step, where), seconds in samples.items():
        if step in steps:
            files[where] += seconds
    whole = sum(files.values())
    rooms: Counter[str] = Counter()
    for where, seconds in files.items():
        rooms[find_room(where)] += seconds / whole
    ours = ("page", "batch", "runtime")
    most = [(where, round(seconds / whole, 4)) for where, seconds in files.most_common() if find_room(where) in ours]
    told: dict[str, Any] = {room: round(share, 4) for room, share in rooms.most_common()}
    return told | {"page, batch and runtime": round(sum(rooms[room] for room in ours), 4), "most": most[:12]}


def find_room(where: str) -> str:
    """The room of a file."""
    return next((room for room, starts in ROOMS.items() if where.startswith(starts)), "elsewhere")


def run_trl(case: Case) -> dict[str, Any]:
    """GRPOTrainer or SFTTrainer over the rows that our run takes, in their order."""
    with tempfile.TemporaryDirectory() as directory:
        return describe(case, *(run_trl_sft if case.task == "sft" else run_trl_grpo)(case, directory))


def run_trl_grpo(case: Case, directory: str) -> tuple[list[dict[str, float]], list[float]]:
    """Steps of one generation and `updates` optimizer steps, and the clock after each."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    from hybridflow.data import PromptPool

    config, rewards, clocks = build_config(case), list[float](), [time.thread_time()]
    tokenizer = AutoTokenizer.from_pretrained(case.model_path)
    prompts = PromptPool(config.data, tokenizer, seed=config.seed).take(case.recipe.rows * config.steps)

    def reward(completions: list[str], **columns: list[str]) -> list[float]:
        if case.recipe.reward == "digits":
            found = list(map(digits, completions))
        else:
            found = [float(text.strip() == answer) for text, answer in zip(completions, columns["answer"], strict=True)]
        rewards.append(statistics.mean(found))
        return found

    columns = {"prompt": prompts.column("prompt").to_pylist(), "answer": prompts.column("answer").to_pylist()}
    given = prompts.arrays("prompt_tokens")
    assert [list(ids) for ids in given] == tokenizer(columns["prompt"])["input_ids"], "TRL would see other prompts"
    trainer, seconds = time_trl_steps(
        lambda watch: GRPOTrainer(
            model=case.model_path, reward_funcs=reward, args=build_grpo_config(case, directory),
            train_dataset=Dataset.from_dict(columns), processing_class=tokenizer,
            callbacks=[watch, build_watch(lambda: clocks.append(time.thread_time()))],
        )
    )  # fmt: skip
    whole = [sum_updates(seconds[start : start + case.updates]) for start in range(0, len(seconds), case.updates)]
    tokens = trainer.state.num_input_tokens_seen / len(whole)
    steps = [{**step, "tokens": tokens, "reward": value} for step, value in zip(whole, rewards, strict=True)]
    return steps, clocks[:: case.updates]


def sum_updates(parts: list[dict[str, float]]) -> dict[str, float]:
    """The optimizer steps of one generation as one step."""
    summed = {name: sum(part[name] for part in parts) for name in ("rollout", "score", "update")}
    return {**summed, "rest": sum(part["sync"] for part in parts)}


def build_trl_common(case: Case, directory: str, rows: int) -> dict[str, Any]:
    """Settings of both of TRL's trainers; `rows` of an optimizer step."""
    micro = case.micro or rows
    return {
        "output_dir": directory, "per_device_train_batch_size": micro, "gradient_accumulation_steps": max(1, rows // micro),
        "max_steps": (case.steps + case.warm_up) * case.updates, "learning_rate": case.recipe.lr, "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused", "max_grad_norm": 1.0, "gradient_checkpointing": False, "bf16": False,
        "torch_compile": bool(case.compile), "logging_strategy": "no", "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False,
        "model_init_kwargs": {"dtype": case.trl_dtype, "attn_implementation": case.attention},
    }  # fmt: skip


def build_grpo_config(case: Case, directory: str) -> Any:
    """One generation of all samples, as many updates from it as ours, no KL, nothing recomputed that need not be."""
    from trl import GRPOConfig

    recipe = case.recipe
    rows = recipe.rows * recipe.samples
    # By itself continuous batching takes nearly all free memory for its cache; these blocks hold all rows.
    blocks = rows * (16 if recipe.ignore_eos else 1)
    return GRPOConfig(
        **build_trl_common(case, directory, rows // case.updates), generation_batch_size=rows, num_generations=recipe.samples,
        num_iterations=1, max_completion_length=recipe.response, beta=0.0, temperature=1.0, top_k=0, epsilon=0.2, epsilon_high=0.28,
        generation_kwargs={"min_new_tokens": recipe.response} if recipe.ignore_eos else None, mask_truncated_completions=False,
        shuffle_dataset=False, use_transformers_continuous_batching=bool(case.paged),
        transformers_continuous_batching_config={"page_size": 32, "num_blocks": blocks, "max_batch_tokens": 4096},
        cache_implementation=case.cache or None,
    )  # fmt: skip


def run_trl_sft(case: Case, directory: str) -> tuple[list[dict[str, float]], list[float]]:
    """Optimizer steps over about as many tokens as ours, and the clock after each."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTTrainer

    from hybridflow.data import SFTLoader

    config, trainers, seen, clocks = build_config(case), list[Any](), [0], [time.thread_time()]
    tokenizer = AutoTokenizer.from_pretrained(case.model_path)
    rows = SFTLoader(config.data, tokenizer, seed=config.seed).take(case.recipe.rows * (config.steps + 1))
    theirs = {"input_ids": "tokens", "completion_mask": "loss_mask"}
    columns = {name: [row.tolist() for row in rows.arrays(ours)] for name, ours in theirs.items()}

    def note() -> None:
        # Tokens that went through the model; padding is not counted.
        seen.append(trainers[0]._total_train_tokens)
        clocks.append(time.thread_time())

    def build(watch: Any) -> Any:
        trainers.append(
            SFTTrainer(
                model=case.model_path, args=build_sft_config(case, directory), callbacks=[watch, build_watch(note)],
                train_dataset=Dataset.from_dict(columns), processing_class=tokenizer,
            )
        )  # fmt: skip
        return trainers[0]

    _, seconds = time_trl_steps(build)
    counts = map(operator.sub, seen[1:], seen)
    return [
        {**sum_updates([step]), "tokens": count, "reward": 0.0} for step, count in zip(seconds, counts, strict=True)
    ], clocks


def build_sft_config(case: Case, directory: str) -> Any:
    """As many rows an optimizer step as ours; packed, as many rows of the greatest length as hold about these tokens."""
    from trl import SFTConfig

    recipe = case.recipe
    packing = {"packing": True, "max_length": case.pack} if case.pack else {"packing": False, "max_length": None}
    return SFTConfig(
        **build_trl_common(case, directory, 1 if case.pack else recipe.rows), **packing, padding_free=bool(case.padding_free),
        completion_only_loss=True, train_sampling_strategy="group_by_length" if case.group else "sequential",
    )  # fmt: skip


if __name__ == "__main__":
    main()
