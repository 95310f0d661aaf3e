"""Models of other packages: another count finds the same products, all that gain are
converted, and the models train.

The installed packages decide which subjects run (the extra `wild`); subjects of plain
Flax always run.
"""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from tests.helpers import slow, slow_except
from tests.wild import counting
from tests.wild.kinds import differences, kinds
from tests.wild.low import convert, serve, train_float, train_low, train_stored
from tests.wild.subjects import SUBJECTS, pure

# Models of Flax's examples and of transformers whose products another subject has, too.
REPEATED = {
    "flax lm1b",
    "transformers mistral",
    "transformers mistral, bf16",
    "transformers gemma",
    "transformers bert",
    "transformers vit",
    "transformers clip",
    "transformers whisper",
}


@pytest.fixture(
    params=[pytest.param(s, marks=[slow] * (str(s) in REPEATED)) for s in SUBJECTS],
    ids=str,
)
def subject(request):
    for package in request.param.packages:
        pytest.importorskip(
            package, reason=f"{package} is not installed; it is part of the extra wild"
        )
    return request.param


def program(fn, params, *inputs):
    """The program's text, without addresses of Python objects."""
    return re.sub(
        r"0x[0-9a-f]+",
        "",
        str(jax.make_jaxpr(lambda params: fn(params, *inputs))(params)),
    )


def paths_of(products):
    return Counter(" + ".join(sorted(product.paths)) for product in products)


def test_report_is_what_an_independent_count_finds(subject):
    made = subject.make()
    with made.context():
        fn, params, inputs = pure(made, subject.kind)
        products = counting.count(fn, params, *inputs)
        pays = [product for product in products if product.pays]
        kept = kinds(fn, params, *inputs)
        low = convert(subject, made)
        in_low = counting.count(
            lambda params, *inputs: low.call(params, {}, *inputs), params, *inputs
        )

        assert (len(pays), len(products)) == subject.products
        assert Counter(
            record.weight_path for record in low.report.converted
        ) == paths_of(pays)
        skipped = [record.weight_path for record in low.report.skipped]
        assert len(skipped) == len(products) - len(pays), skipped
        assert all(record.reason for record in low.report.skipped)
        assert differences(low.report, kept) == {}
        # The converted program: every product that is reported runs in FP8, and no
        # other.
        narrow = counting.float8_products(in_low)
        assert len(narrow) == len(pays)
        assert len(in_low) - len(narrow) == len(products) - len(pays)


@slow_except("linen scan and remat", "nnx scan and remat")
def test_a_conversion_leaves_the_original_program_as_it_is(subject):
    made = subject.make()
    with made.context():
        fn, params, inputs = pure(made, subject.kind)
        before = program(fn, params, *inputs)
        convert(subject, made).call(params, {}, *inputs)
        assert program(fn, params, *inputs) == before


@slow_except("linen convnet")
def test_trains_as_float_does(subject):
    made = subject.make()
    with made.context():
        in_float = train_float(subject, made)
        low = convert(subject, made)
        assert low.weights, "no weight is stored"
        in_low = train_low(subject, made, low)
    assert in_float[-1] < 0.9 * in_float[0], (
        "the subject learns too little to tell anything"
    )
    assert in_low[-1] <= max(1.05 * in_float[-1], in_float[-1] + 0.02), (
        in_float[-1],
        in_low[-1],
    )


@slow_except("nnx scan")
def test_trains_without_float_weights(subject):
    made = subject.make()
    with made.context():
        in_float = train_float(subject, made)
        in_low = train_stored(subject, made, convert(subject, made))
    # Nineteen twentieths of the way: rounding is random here, so a small model's 25
    # steps differ from run to run.
    assert in_low[-1] <= in_float[-1] + 0.05 * (in_float[0] - in_float[-1]), (
        in_float[0],
        in_float[-1],
        in_low[-1],
    )


@slow_except("linen attention, tied", "linen scan on axis 1", "linen experts by einsum")
def test_serves_stored_weights_alone(subject):
    if subject.kind == "nnx":
        pytest.skip(
            "an NNX model loads stored weights in place: tests/test_inference.py"
        )
    made = subject.make()
    with made.context():
        low = convert(subject, made)
        inputs = (*made.inputs, dict(made.options))
        expected = jax.jit(lambda params: low.call(params, {}, *inputs))(
            made.params
        ).astype(jnp.float32)
        params, stored, both = serve(made, low)
        assert both == {
            path
            for path, weight in low.weights.items()
            if weight.float_reads == "lookup"
        }
        found = jax.jit(lambda stored: low.call(params, stored, *inputs))(
            stored
        ).astype(jnp.float32)
    assert jnp.isfinite(found).all()
    assert jnp.linalg.norm(found - expected) <= 0.05 * jnp.linalg.norm(expected)
