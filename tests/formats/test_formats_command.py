"""`python -m tcfp_jax.formats`, the docs that come from it, and casts' check."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from benchmarks import quantizers, records
from tcfp_jax.formats import CATALOG, __main__
from tests.helpers import parametrize

DOCS = records.ROOT / "docs" / "formats.md"


@parametrize(
    "name, status, said",
    [
        ("mx6", 0, "bits per value 6 "),
        ("e3m4", 0, " 15 15.5\n"),
        ("e2m1f_e8m0_t16", 0, "scale e8m0_t16"),
        ("tcfp12", 0, "linear4_e8m0_t32_mse"),
        ("mxfp5", 2, "eXmY"),
    ],
)
def test_one_datatype(capsys, name, status, said):
    assert __main__.main([name]) == status
    output = capsys.readouterr()
    assert said in (output.err if status else output.out)


def test_a_reader_may_have_enough():
    command = [sys.executable, "-m", "tcfp_jax.formats", "e3m4"]
    with subprocess.Popen(
        command, cwd=records.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert b"BrokenPipe" not in process.stderr.read()
        assert process.wait() == 0


def test_the_list_has_every_name(capsys, monkeypatch):
    monkeypatch.setattr(__main__, "_snr_db", lambda made: 0.0)
    assert __main__.main([]) == 0
    first = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert first == ["name", *CATALOG]


def test_docs_say_what_the_code_says(capsys):
    text = DOCS.read_text()
    assert (DOCS.parent / "plots/formats.svg").exists()
    assert "plots/formats.svg" in text
    assert __main__.main(["--table"]) == 0
    table = text.split("<!-- begin: formats -->\n")[1].split("<!-- end: formats -->")[0]
    assert table == capsys.readouterr().out


@pytest.mark.parametrize("name", quantizers.CASTS)
def test_casts_are_checked_before_they_are_timed(name, monkeypatch):
    x = jax.random.normal(jax.random.key(0), (64, 256), jnp.bfloat16)
    assert quantizers._checked_cast(name, x)(x).dtype == x.dtype
    right = quantizers.formats.cast
    monkeypatch.setattr(
        quantizers.formats, "cast", lambda x, **how: right(x, **how).at[3].add(1)
    )
    with pytest.raises(ArithmeticError, match="not timed"):
        quantizers._checked_cast(name, x)
