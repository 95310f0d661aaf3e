"""`python -m tcfp_jax.formats`, the docs that come from it, and casts' check."""

import subprocess
import sys

import jax
import jax.numpy as jnp

from benchmarks import quantizers, records
from tcfp_jax.formats import CATALOG, __main__, cast, datatype
from tests.helpers import parametrize, refused, same_bits

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


@parametrize(
    "text, number, scale",
    [
        ("e2m2f_e8m0_t16", "e2m2f", "e8m0_t16"),
        ("mxfp4e2", "e2m1f", "e8m0_t32"),
        ("nf4", "nf4", "float32_t64"),
        ("e4m3fn", "e4m3fn", None),
        ("float8_e4m3fn_e8m0_t32", "e4m3fn", "e8m0_t32"),
        ("icb44fi_e2m3fnuz_e8m0_t32s8", "icb44fi_e2m3fnuz", "e8m0_t32s8"),
        ("torch.float8_e5m2_float32", "e5m2", "float32"),
        ("Float8_E5M2FNUZ_e8m0_t32", "e5m2b16fnuz", "e8m0_t32"),
    ],
)
def test_one_text_means_the_same_everywhere(capsys, text, number, scale):
    made = datatype(number, scale)
    assert datatype(text) == made
    x = jnp.linspace(-3.0, 3.0, 64)
    assert same_bits(cast(x, text), cast(x, made))
    assert __main__.main([text]) == 0
    content = number if scale is None else f"{number}_{scale}"
    assert f"in all {content}\n" in capsys.readouterr().out


def test_a_text_without_a_meaning_names_what_is_near():
    with refused(r"did you mean.*mxfp.*As codes: 'mxfp5'"):
        cast(jnp.ones(4), "mxfp5")


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


@parametrize("name", quantizers.CASTS)
def test_casts_are_checked_before_they_are_timed(name, monkeypatch):
    x = jax.random.normal(jax.random.key(0), (64, 256), jnp.bfloat16)
    assert quantizers._checked_cast(name, x)(x).dtype == x.dtype
    right = quantizers.formats.cast
    monkeypatch.setattr(
        quantizers.formats, "cast", lambda x, **how: right(x, **how).at[3].add(1)
    )
    with refused("not timed", ArithmeticError):
        quantizers._checked_cast(name, x)
