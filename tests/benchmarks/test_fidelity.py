"""Gradients are compared with float32's: of products alone as theory says, of the whole model, and shown in a table."""

import dataclasses
import json
import math
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import common, fidelity, gradients, report
from benchmarks.gradients import Reference, agreement, compare_alone, compare_whole, compiled, matrices_of, refer
from models.llama import LlamaConfig
from models.settings import preset
from models.training import init
from tests.helpers import decibels, filled

SIZE = LlamaConfig(layers=2, width=16, heads=1, kv_heads=1, hidden=16, context=8)
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(1) as made:
        yield made


def test_agreement_is_that_of_the_values():
    r = RNG.standard_normal(100)
    v = r + 0.1 * RNG.standard_normal(100)
    snr_db, cosine = agreement((r @ r, (v - r) @ (v - r), v @ v))
    assert snr_db == pytest.approx(decibels(r, v))
    assert cosine == pytest.approx(r @ v / np.sqrt(r @ r * (v @ v)))
    assert agreement((1.0, 0.0, 1.0)) == (math.inf, 1.0)
    assert np.isnan(agreement((1.0, math.nan, 1.0))).all()


def test_what_errors_have_in_common():
    same, own = RNG.standard_normal(10_000), RNG.standard_normal((4, 10_000))
    errors = same + own
    share = gradients.common_share(np.sum(errors**2), np.sum(errors.sum(0) ** 2), 4)
    assert share == pytest.approx(0.5, abs=0.05)
    assert math.isnan(gradients.common_share(1.0, 1.0, 1))


def test_matrices_are_named_by_kind_and_layer():
    assert matrices_of("block_11/mlp_in/kernel", ()) == {"mlp_in 11": ()}
    assert matrices_of("layers/up/kernel", (2,)) == {"up 0": (0,), "up 1": (1,)}
    assert [gradients.place_of(name) for name in ("mlp_in 11", "up 0")] == [(11, "mlp_in"), (0, "up")]


def test_products_alone_have_the_errors_of_their_operands(pool):
    x, w, g = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((256, 64), (64, 64), (256, 64)))
    reference = Reference(None, (), (), (), {}, {"up 0": (x, w, g)})
    found = {}
    for name in ("bf16", "tensorwise", "tcfp12"):
        run = fidelity._run(fidelity.CPU, name)
        shapes = gradients._shapes((x, w, g))
        programs = {shapes: pool.submit(gradients._alone_of(run).lower(x, w, g, jax.random.key(0)).compile)}
        found[name] = [snr_db for snr_db, _ in compare_alone(reference, programs, jax.random.key(0))["up 0"]]
    # Two operands of 55.6 (BF16), 31.5 (E4M3), 25.5 (E5M2) and 64 dB (hi + lo).
    np.testing.assert_allclose(found["bf16"], 52.6, atol=1)
    np.testing.assert_allclose(found["tensorwise"], [28.5, 24.5, 24.5], atol=1)
    np.testing.assert_allclose(found["tcfp12"], [31.5, 31.5, 52.6], atol=1)


def test_a_model_is_compared_as_a_whole_and_layer_by_layer(pool, tmp_path):
    run = preset(SIZE, recipe="bf16", batch=2, sequence=8, dtype="float32")
    drawn = np.random.default_rng(1).integers(0, 256, (2, 2, 9))
    batches = tuple(jnp.asarray(windows, jnp.int32) for windows in drawn)
    params, key = filled(jax.eval_shape(lambda: init(run)).params), jax.random.key(0)
    reference = refer(run, params, batches, alone=1)
    kinds = ("query", "key", "value", "output", "gate", "up", "down")
    assert list(reference.matrices) == [f"{kind} {layer}" for layer in (0, 1) for kind in sorted(kinds)]
    x, w, g = reference.matrices["down 1"]
    assert (x.shape, w.shape, g.shape) == ((8, 16), (16, 16), (8, 16))
    programs = compiled(run, reference, pool)
    assert list(programs) == [None, ((8, 16), (16, 16), (8, 16))]  # of all matrices one program
    whole, alone = compare_whole(run, reference, programs, key), compare_alone(reference, programs, key)
    assert abs(whole.loss) < 1e-3
    assert min(snr_db for snr_db, _ in (whole.gradient, whole.mean, *whole.matrices.values())) > 30
    assert all(snr_db > 40 for one in alone.values() for snr_db, _ in one)

    row = fidelity.Row(
        "bf16", whole.loss, *whole.gradient, whole.mean[0], whole.common, whole.matrices, alone, 1.0, ""
    )  # fmt: skip
    config = dataclasses.replace(fidelity.SMOKE, model=SIZE)
    path = tmp_path / common.device_slug() / "fidelity.json"
    common.write_result(path, "fidelity", common.make_header(), config, [row, row])
    assert json.loads(path.read_text())["rows"][0]["alone"]["up 0"][0][0] == pytest.approx(alone["up 0"][0][0])
    page = report.render_section("fidelity", tmp_path)
    assert f"{whole.gradient[0]:.1f} |" in page and "| down | gate | key |" in page
    picture = tmp_path / "fidelity.png"
    report.draw(common.read_result("fidelity", tmp_path), picture)
    assert report.read_source(picture)


def test_a_way_that_fails_leaves_the_others_their_rows(monkeypatch):
    def measured(run, name, *rest):
        if name == "tensorwise":
            raise ArithmeticError("not today")
        return name

    for name in ("_base", "refer", "compiled"):
        monkeypatch.setattr(fidelity, name, lambda *args: ())
    monkeypatch.setattr(fidelity, "_measured", measured)
    rows = fidelity.measure(dataclasses.replace(fidelity.SMOKE, ways=("bf16", "tensorwise", "tcfp12")))
    assert [next(rows), next(rows)] == ["bf16", "tcfp12"]
    with pytest.raises(RuntimeError, match="1 ways failed, see above: tensorwise"):
        next(rows)


def test_wrong_requests_are_refused(tmp_path):
    wrong = {"unknown": ["--variants", "tcfp13"], "from step to step": ["--variants", "noise"]}
    for message, arguments in {**wrong, "need a batch": ["--batches", "0"]}.items():
        with pytest.raises(ValueError, match=message):
            fidelity.main(["--smoke", "--out", str(tmp_path), *arguments])
    np.savez(tmp_path / "other.npz", kernel=np.ones(2))
    options = common._parse(fidelity, ["--smoke", "--start", str(tmp_path / "other.npz")])
    with pytest.raises(ValueError, match="the parameters of another model"):
        fidelity.configure(options)
