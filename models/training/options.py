"""Options of `python -m models.train`: those that are settings of the run, and those of
folders and machines.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from tcfp_jax.recipes import NAMES, Recipe

from ..huggingface.folders import Form
from ..nets.families import in_e4m3
from ..nets.meshes import AXES
from ..nets.sizes import model_names
from .forms import MomentFormat, Update, Weights
from .processes import HEARTBEAT_TIMEOUT
from .settings import BAD_STEPS, FINE_TUNING, Included, TrainConfig

ACTIVATIONS = ("bf16", "e4m3")


def _default(name: str) -> str:
    """Return the defaults of a setting as its help says them."""
    value = getattr(TrainConfig, name)
    return f"default: {value:g} for tiny, {FINE_TUNING[name]:g} for a folder"


_OVERRIDES: dict[str, dict[str, tuple[type, str]]] = {
    "training": {
        "steps": (int, f"optimizer steps ({_default('steps')})"),
        "batch": (int, f"windows per step ({_default('batch')})"),
        "sequence": (
            int,
            f"tokens predicted per window (default: {TrainConfig.sequence} for tiny,"
            " at most 1024 for a folder)",
        ),
        "accumulate": (
            int,
            "parts of a batch, computed one after another for less memory (default: 1)",
        ),
        "learning_rate": (
            float,
            f"peak learning rate ({_default('learning_rate')}; 20 times that with"
            " --lora, a tenth with pairs)",
        ),
        "final_fraction": (
            float,
            "part of the peak learning rate at which its cosine ends (default: 0)",
        ),
        "weight_decay": (float, f"of AdamW ({_default('weight_decay')})"),
        "beta": (
            float,
            "pull of DPO towards the reference, of pairs in --data (default: 0.1)",
        ),
        "label_smoothing": (
            float,
            "share of pairs that DPO takes for exchanged (default: 0)",
        ),
        "finish": (
            str,
            (
                "products of the last part of the steps, such as bf16:0.1: bf16,"
                " bf16_forward or a recipe, and a fraction (default: as it begins)"
            ),
        ),
        "seed": (
            int,
            "seed of initial weights, batches and stochastic rounding (default: 0)",
        ),
    },
    "precision": {
        "error_dtype": (
            str,
            "of error-feedback buffers: float32 (default), bfloat16 or float8_e5m2",
        ),
        "dtype": (
            str,
            (
                "of activations: auto (default; bfloat16, on CPUs float32), float32 or"
                " bfloat16"
            ),
        ),
        "monitor": (
            int,
            (
                "steps between two observed ones, which measure rounding and updates"
                " (default: never)"
            ),
        ),
    },
    "speed and memory": {
        "remat": (
            str,
            (
                "values that a Llama keeps for its backward pass: none, products,"
                " block, names joined by +, or auto, as many as fit (default: the"
                " model's)"
            ),
        ),
        "steps_per_call": (int, "steps in one dispatch (default: 10)"),
    },
    "model and text": {
        "heldout_windows": (
            int,
            "windows of the held-out evaluation"
            f" (default: {TrainConfig.heldout_windows})",
        ),
        "date": (
            str,
            (
                "YYYY-MM-DD that chat templates take for today (default: the day on"
                " which the run begins)"
            ),
        ),
        "corpus_bytes": (
            int,
            (
                "at most this much text, of files without documents (default: 16 MiB"
                " of the standard library, all of --data)"
            ),
        ),
    },
}
_SCRIPT = "tcfp-train"
_MODULE = "python -m models.train"
_EXAMPLES = """examples:
  python -m models.train --model FOLDER --data chats.jsonl --out RUN \\
      --export NEW --format fp8
      fine-tune a Llama, Qwen or Gemma of Hugging Face, and write a folder that
      vLLM serves
  python -m models.train --data novels/ notes.txt --steps 1000
      a small GPT with stored weights on your text, next to BF16
  python -m models.train --model llama-1b --recipe tensorwise --mesh fsdp=8 \\
      --compare none --out runs/1b
      a Llama with float32 weights on eight GPUs; after any interruption add --resume
"""


def _add_model(model: argparse._ArgumentGroup) -> None:
    sizes = ", ".join(model_names())
    model.add_argument(
        "--model",
        metavar="NAME|FOLDER",
        help=f"size (default: tiny): {sizes}; or a folder of Hugging Face",
    )
    model.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        help=(
            "files and folders of UTF-8 text, read as bytes, one .npy of token ids, or"
            " with a tokenizer .jsonl, .ndjson or .json of documents, or of pairs"
            " {prompt, chosen, rejected} for DPO (default: the standard library)"
        ),
    )
    model.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.json that makes ids of text (default: a folder's)",
    )
    model.add_argument(
        "--vocabulary", type=int, help="number of token ids (default: the tokenizer's)"
    )
    model.add_argument(
        "--start",
        metavar="PATH",
        help=(
            "float parameters of this model to start from: an .npz of --export, or a"
            " folder (default: random ones)"
        ),
    )
    model.add_argument(
        "--sample",
        metavar="PROMPT",
        help="prompt that the model continues at each checkpoint (default: none)",
    )


def _add_precision(precision: argparse._ArgumentGroup) -> None:
    precision.add_argument(
        "--weights",
        choices=get_args(Weights),
        help=(
            "W_hi + W_lo alone (default), or float32 parameters next to quantized"
            " weights (default with --recipe)"
        ),
    )
    names = ", ".join(NAMES)
    precision.add_argument(
        "--recipe",
        metavar="NAME",
        help=(
            f"{names} (default: tcfp12_single; of float weights tcfp12, of frozen ones"
            " tensorwise)"
        ),
    )
    precision.add_argument(
        "--activations",
        choices=ACTIVATIONS,
        help=(
            "of products with weights in nvfp4: bf16 (default), or e4m3, which"
            " multiplies on FP8 tensor cores, gradients too"
        ),
    )
    precision.add_argument(
        "--lora",
        type=int,
        metavar="RANK",
        help=(
            "train adapters of a rank next to a folder's weights, frozen in FP8"
            " (default: train all weights)"
        ),
    )
    precision.add_argument(
        "--include",
        choices=get_args(Included),
        help=(
            "layers with the recipe: every one (default), all but the stored head's"
            " product, those measured to be faster, or all but table and head"
        ),
    )
    precision.add_argument(
        "--moments",
        choices=get_args(MomentFormat),
        help=(
            "AdamW's moments of stored weights (default: 8bit; float weights have"
            " float32)"
        ),
    )
    precision.add_argument(
        "--update",
        choices=get_args(Update),
        help=(
            "stored weights behind the backward pass, or layer by layer in it"
            " (backward), without memory for the gradients of the other layers. Then"
            " each matrix is clipped to its part of the limit, not by the norm of all"
            " gradients. auto is behind if that step fits the device, else"
            " backward, and prints its choice (default: auto; on CPUs behind)"
        ),
    )
    precision.add_argument(
        "--compare",
        choices=["bf16", "none"],
        help=(
            "baseline to train too (default: bf16; none with --recipe bf16 and for"
            " folders)"
        ),
    )


def command() -> list[str]:
    """Return the words that started this program: its script, or its module."""
    if Path(sys.argv[0]).name == _SCRIPT:
        return [_SCRIPT]
    return _MODULE.split()


def with_hyphens(arguments: Sequence[str]) -> list[str]:
    """Return arguments whose options have hyphens, where TRL has underscores.

    >>> with_hyphens(["--label_smoothing=0.1", "--out", "my_run"])
    ['--label-smoothing=0.1', '--out', 'my_run']
    """
    found = []
    for one in arguments:
        name, equals, value = one.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        found.append(name + equals + value)
    return found


def parser_of(description: str) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Settings that are not given are not in its result.
    """
    parser = argparse.ArgumentParser(
        prog=" ".join(command()),
        description=description,
        argument_default=argparse.SUPPRESS,
        epilog=_EXAMPLES.replace(_MODULE, " ".join(command())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    named: dict[str, Any] = {}
    for name in (
        "model and text",
        "precision",
        "training",
        "folder",
        "speed and memory",
        "machines",
    ):
        named[name] = parser.add_argument_group(name)
    _add_model(named["model and text"])
    _add_precision(named["precision"])
    for group, options in _OVERRIDES.items():
        for name, (kind, text) in options.items():
            named[group].add_argument(
                "--" + name.replace("_", "-"), type=kind, help=text
            )
    named["speed and memory"].add_argument(
        "--memory",
        type=float,
        default=None,
        metavar="GB",
        help=(
            "of a device that a step may need, for --remat auto and --update auto"
            " (default: 95 %% of what JAX may allocate)"
        ),
    )
    _add_folder(named["folder"])
    _add_machines(named["machines"])
    return parser


def _add_folder(group: argparse._ArgumentGroup) -> None:
    """Add options of the run's folder and of what is written there."""
    group.add_argument(
        "--out",
        type=Path,
        default=None,
        help="folder of the run (default: a new one under runs/)",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        default=False,
        help=(
            "continue the run in --out, or the newest under runs/; other settings are"
            " the run's own"
        ),
    )
    group.add_argument(
        "--checkpoint-every",
        type=int,
        default=None,
        metavar="N",
        help=(
            "steps between checkpoints, the last one after the last step (default:"
            " about a tenth of the run; 0 writes none, so nothing can be resumed)"
        ),
    )
    group.add_argument(
        "--export",
        type=Path,
        default=None,
        metavar="PATH",
        help=(
            "write the trained weights: float32 into an .npz, or a folder that"
            " Transformers and vLLM read (default: neither)"
        ),
    )
    group.add_argument(
        "--format",
        choices=get_args(Form),
        default=None,
        help="of the weights in that folder (default: bf16)",
    )
    group.add_argument(
        "--show-example",
        action="store_true",
        default=False,
        help="print a document, with the tokens that the loss counts in color",
    )
    group.add_argument(
        "--tensorboard",
        action="store_const",
        const="on",
        default="off",
        help=(
            "write losses and readings of --monitor for TensorBoard, too (needs pip"
            " install -e '.[monitor]')"
        ),
    )
    group.add_argument(
        "--bad-steps",
        type=int,
        default=BAD_STEPS,
        metavar="N",
        help=(
            "steps in a row without a finite loss after which the run stops (default:"
            f" {BAD_STEPS})"
        ),
    )


def _add_machines(group: argparse._ArgumentGroup) -> None:
    """Add options that belong to the machines and not to the run."""
    group.add_argument(
        "--mesh",
        type=str,
        default=None,
        metavar="AXIS=SIZE,...",
        help=(
            f"of all devices, axes {', '.join(AXES)} (default: one device; of several"
            " processes fsdp over all)"
        ),
    )
    group.add_argument(
        "--coordinator",
        default=None,
        metavar="HOST:PORT",
        help="address of the first process (default: the scheduler's)",
    )
    group.add_argument(
        "--processes",
        type=int,
        default=None,
        help="number of processes that train together (default: the scheduler's)",
    )
    group.add_argument(
        "--process",
        type=int,
        default=None,
        help="index of this process, from 0 (default: the scheduler's)",
    )
    group.add_argument(
        "--heartbeat-timeout",
        type=int,
        default=HEARTBEAT_TIMEOUT,
        metavar="SECONDS",
        help=(
            "silence after which a process is lost, and the others end (default:"
            f" {HEARTBEAT_TIMEOUT})"
        ),
    )


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `TrainConfig` that the command line names, without the
    model.
    """
    names = (
        "recipe",
        "start",
        "include",
        "weights",
        "moments",
        "update",
        "data",
        "vocabulary",
        "tokenizer",
        "lora",
        "sample",
        *itertools.chain(*_OVERRIDES.values()),
    )
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    if getattr(options, "activations", "bf16") == "e4m3":
        given["recipe"] = _multiplied_in_e4m3(given.get("recipe"))
    return {**given, "data": tuple(given["data"])} if "data" in given else given


def _multiplied_in_e4m3(recipe: str | None) -> Recipe:
    if recipe != "nvfp4":
        raise ValueError(
            f"--activations e4m3 with --recipe {recipe}: it is for weights in four"
            " bits whose scales keep them exact in E4M3; use --recipe nvfp4"
        )
    return in_e4m3(recipe)
