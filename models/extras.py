"""Packages that this project installs on demand, as extras of its own."""

import importlib.util


def require(extra: str, *packages: str) -> None:
    """Raise `ImportError` if a package is missing; the message names the extra that
    installs it.

    >>> require("train", "jax", "sys")
    >>> require("train", "jax", "no_such_package")  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
      ...
    ImportError: no_such_package is not installed; pip install 'tcfp_jax[train]', or
    in a clone pip install -e '.[train]'
    """
    missing = [one for one in packages if importlib.util.find_spec(one) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ImportError(
            f"{', '.join(missing)} {verb} not installed; pip install"
            f" 'tcfp_jax[{extra}]', or in a clone pip install -e '.[{extra}]'"
        )
