"""Compiled programs, which JAX keeps in the user's own cache."""

import os
import sys
from pathlib import Path
from typing import Any

import jax


def cache_programs() -> None:
    """Let JAX keep compiled programs in the user's own cache, and load them from it.

    On GPUs, compilation times candidate kernels and takes the fastest. Two processes
    may take different ones and differ in the last bit, so a resumed run loads the
    programs of the process that began it. They are not in the folder of the run: a user
    who may write that folder could then choose which code this machine runs.
    """
    config: Any = jax.config  # which makes its attributes at run time
    if config.jax_compilation_cache_dir is None:
        caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not caches.is_absolute():
            caches = Path.home() / ".cache"
        folder = caches / "tcfp_jax"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            print(
                f"compiled programs are not kept ({error}), so a resumed run may differ"
                " in the last bit; name a folder in JAX_COMPILATION_CACHE_DIR",
                file=sys.stderr,
            )
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
