"""Packages that are installed on demand."""

import subprocess
import sys

from models.extras import require
from tests.helpers import refused


def test_a_missing_package_names_its_extra():
    with refused(
        r"no_package is not installed; pip install 'tcfp_jax\[bench\]'", ImportError
    ):
        require("bench", "sys", "no_package")
    with refused("no_package, none are not installed", ImportError):
        require("bench", "no_package", "none")


def test_models_without_their_extra_name_it():
    """`models` asks before it imports anything else."""
    program = (
        "import sys; sys.modules['jinja2'] = None; import models.huggingface.templates"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True
    )
    last = found.stderr.splitlines()[-1]
    assert last == (
        "ImportError: jinja2 is not installed; pip install 'tcfp_jax[train]', or in a"
        " clone pip install -e '.[train]'"
    )
