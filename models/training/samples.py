"""Samples of a run: its prompt, continued at each checkpoint and at the end."""

import json
from typing import Any

from tqdm import tqdm

from tcfp_jax.inference import folders

from .checkpoint import RunDirectory
from .learners import model_of, quantized_of
from .processes import is_first, of_first
from .sampling import continued, prompt_ids
from .settings import TrainConfig
from .state import TrainState

SAMPLES_FILE = "samples.jsonl"
LARGEST_SAMPLES = 1 << 28  # bytes


def check_prompt(config: TrainConfig) -> None:
    """Raise `ValueError` if the model cannot continue the prompt of the run."""
    if config.sample is not None:
        prompt_ids(config.sample, config.size.context, config.data.read_tokenizer())


def sample(
    config: TrainConfig, state: TrainState, step: int, directory: RunDirectory
) -> None:
    """Continue the prompt of the run, print the text, and append it to the folder."""
    if config.sample is None:
        return
    text, rate = continued(
        model_of(config),
        {"params": state.params, "tcfp": quantized_of(config, state)},
        config.sample,
        context=config.size.context,
        tokenizer=config.data.read_tokenizer(),
    )
    if is_first():
        tqdm.write(f"step {step}: {config.sample!r} -> {text!r} ({rate:,.0f} tokens/s)")
        entry = dict(step=step, prompt=config.sample, text=text, tokens_per_second=rate)
        directory.extend(SAMPLES_FILE, json.dumps(entry) + "\n")


def resume_samples(
    config: TrainConfig, state: TrainState, step: int, directory: RunDirectory
) -> None:
    """Cut the samples of a folder back to a step, and write that of the step if it is
    missing, as after a kill between a checkpoint and its sample.
    """
    if config.sample is None:
        return

    def holds_sample() -> str:
        lines = _cut(directory, step)
        found = [(one["step"], one.get("prompt")) for one in map(_entry, lines)]
        return json.dumps((step, config.sample) in found)

    is_there = json.loads(of_first(holds_sample))
    if step > 0 and not is_there:
        sample(config, state, step, directory)


def _cut(directory: RunDirectory, step: int) -> list[str]:
    """Return the lines of the samples until a step, after others left the file."""
    if not (directory.path / SAMPLES_FILE).exists():
        return []
    text = folders.read_bytes(directory.path, SAMPLES_FILE, LARGEST_SAMPLES)
    lines = text.decode(errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if _entry(line).get("step", step + 1) <= step]
    if kept != lines:
        folders.replace_text(directory.path, SAMPLES_FILE, "".join(kept))
    return kept


def _entry(line: str) -> dict[str, Any]:
    """Return the entry of a line, empty if it is damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    sound = isinstance(found, dict) and isinstance(found.get("step"), int)
    return found if sound and line.endswith("\n") else {}
