"""Runs paired by seed: the original's comparison; no model is trained here."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from benchmarks import common, original, pairs, report
from benchmarks.pairs import BASELINE
from tcfp_jax import formats
from tcfp_jax.linen import TCFPDense
from tests.helpers import decibels


def row(name, seed, loss, *, variants=original.VARIANTS):
    return pairs.Row(name, seed, loss, loss, loss, None, 1.0, repr(variants[name]), **common.origin_of_row())


def test_ratios_are_of_one_seed():
    runs = [(BASELINE, 0, 1.0), (BASELINE, 1, 2.0), ("fp8", 0, 1.1), ("fp8", 1, 1.9), ("fp8", 2, 9.0)]
    rows = [row(*run) for run in (*runs, (BASELINE, 3, 1.0), ("fp8", 3, 1.0))]
    baseline, fp8 = pairs.summarize(rows, tuple(original.VARIANTS))
    assert (baseline.mean_ratio, baseline.standard_error, fp8.seeds) == (1, 0, 3)  # of seed 2 there is no baseline
    assert (fp8.min_ratio, fp8.max_ratio) == pytest.approx((math.exp(-0.1), math.exp(0.1)))
    # The rerun is compared with BF16, the others with the mean of both.
    again, fp8 = pairs.summarize([*rows, row(pairs.RERUN, 0, 1.2)], (pairs.RERUN, "fp8"))
    assert (again.mean_ratio, fp8.max_ratio) == pytest.approx((math.exp(0.2), 1)) and fp8.seeds == 3
    diverged = pairs.summarize([*rows, row("abd", 0, math.nan), row("abd", 1, 2.0)], ("abd",))
    assert diverged[0].mean_ratio == math.inf and math.isnan(diverged[0].standard_error)


def test_runs_stop_at_their_budget_and_resume(tmp_path, monkeypatch, capsys):
    losses = {BASELINE: 1.0, "fp8": 1.1, "fp8_e4m3": 1.2}
    monkeypatch.setattr(original, "measure_one", lambda config, name, seed: row(name, seed, losses[name] + seed))
    compiled = []
    monkeypatch.setattr(original, "compile_one", lambda config, name: compiled.append(name))
    command = ["--smoke", "--out", str(tmp_path), "--variants"]
    first = original.main([*command, f"{BASELINE},fp8"])
    assert [(r.name, r.seed) for r in first] == [(BASELINE, 0), ("fp8", 0)]
    assert original.main([*command, "fp8_e4m3", "--resume", "--budget-seconds", "-1"]) == first
    assert "1 of 1 runs left undone" in capsys.readouterr().out
    assert len(original.main([*command, "fp8_e4m3,fp8", "--resume"])) == 3
    assert compiled == [BASELINE, "fp8", "fp8_e4m3"]  # what has a run left, and time
    page = report.render_section("original", tmp_path)
    assert "| plain FP8, E4M3 gradients | 1.2214 |" in page and original.WHY in page
    # A variant that is another one now is not kept, and other settings are refused.
    monkeypatch.setitem(original.VARIANTS, "fp8", original.VARIANTS["tcfp12"])
    path = tmp_path / common.device_slug() / "original.json"
    settings = json.loads(path.read_text())["config"]
    settings = {name: settings[name] for name in original.Config().settings}
    assert [r.name for r in pairs.read_rows(path, settings, original.VARIANTS)] == [BASELINE, "fp8_e4m3"]
    with pytest.raises(
        ValueError, match=r"other settings: steps=4 in the file but 3 now; .* another --out, or drop --re"
    ):
        pairs.read_rows(path, {**settings, "steps": 3}, original.VARIANTS)
    for message, wrong in {
        "tcfp13": ["--variants", "tcfp13"], "must contain bf16": ["--variants", "fp8"],
        "needs --json or --out": ["--resume"],
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=message):
            original.main(wrong)
    with pytest.raises(SystemExit):
        original.main(["--seeds", "0"])
    assert "--seeds: 0 is no whole number of at least 1; give one" in capsys.readouterr().err


def test_a_variant_that_fails_leaves_the_others_their_runs():
    def measure_one(name, seed):
        if name == "abd":
            raise ArithmeticError("not today")
        return row(name, seed, 1.0)

    config = original.Config(wanted=pairs.Wanted((BASELINE, "abd", "srr"), (0, 1)))
    rows = pairs.runs(config, original.VARIANTS, measure_one, compile_one=lambda name: None)
    found = [(made.name, made.seed) for made in itertools.islice(rows, 4)]
    assert found == [(name, seed) for seed in (0, 1) for name in (BASELINE, "srr")]
    with pytest.raises(RuntimeError, match="1 variants failed, see above: abd"):
        next(rows)


def test_a_plain_fp8_that_diverges_is_not_explained_away(tmp_path):
    rows = [row(BASELINE, 0, 1.0), row("fp8", 0, math.nan), row("fp8_e4m3", 0, 1.0)]
    path = tmp_path / "cpu" / "original.json"
    common.write_result(path, "original", common.make_header(), original.Config(), rows)
    page = report.render_section("original", tmp_path)
    assert "diverged" in page and original.WHY not in page
    plain = [original.VARIANTS[name] for name in original.PLAIN]
    assert {"full"} == {way for one in plain for way in (one.dgrad, one.wgrad)}  # what it says of the backward pass


def test_fake_quantization_rounds_weights_and_activations_alone():
    rng = np.random.default_rng(0)
    x, w, g = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((64, 32), (32, 32), (64, 32)))
    params = {"params": {"kernel": w, "bias": jnp.ones(32)}}
    q = lambda v: formats.cast(v, original.FP8, scalemode="ceil")

    def of(recipe):
        layer = TCFPDense(32, recipe=recipe, dtype=jnp.float32)
        with nn.intercept_methods(original.fake_quantized):
            return jax.vjp(layer.apply, params, x)

    y, back = of(original.FAKE_RECIPE)
    dparams, dx = back(g)
    np.testing.assert_allclose(y, q(x) @ q(w) + 1, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, g @ q(w).T, rtol=1e-5, atol=1e-5)  # gradients are not rounded
    np.testing.assert_allclose(dparams["params"]["kernel"], q(x).T @ g, rtol=1e-5, atol=1e-4)
    assert 27 < decibels(x @ w, y - 1) < 30
    assert decibels(x @ w, of(original.VARIANTS[BASELINE])[0] - 1) > 50  # layers of others are left alone
