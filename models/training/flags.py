"""Flags of XLA that the steps of a run are compiled with on GPUs.

They are options of the step's own compilation. So they may be chosen after JAX has
found its devices, and one that this jaxlib does not know is left out: in `XLA_FLAGS` it
would end the process. A flag that the user's `XLA_FLAGS` names keeps the user's value.
"""

import functools
import os

import jax

# A scan's stacks begin without zeros, and are copied next to other work.
OF_LOOPS = (
    "xla_gpu_enable_dus_accumulator_zero_init_elimination",
    "xla_gpu_experimental_enable_selective_memcpy_overlap",
)


@functools.cache
def step_flags() -> dict[str, bool]:
    """Return the flags of a step as options of `jax.jit`; {} without a GPU."""
    if jax.default_backend() != "gpu":
        return {}
    given = os.environ.get("XLA_FLAGS", "")
    return {name: True for name in OF_LOOPS if name not in given and is_known(name)}


def is_known(flag: str) -> bool:
    """Return whether this jaxlib has a flag.

    >>> is_known("xla_gpu_no_such_flag")
    False
    """
    try:
        jax.jit(_nothing, compiler_options={flag: True}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True


def _nothing() -> int:
    return 0


def described() -> str | None:
    """Return a line that names the flags of this process's steps, or None."""
    flags = step_flags()
    if not flags:
        return None
    names = " ".join(f"--{name}=true" for name in flags)
    return f"XLA: steps have {names}; XLA_FLAGS with other values win"
