"""Another count of parameters finds what reports say: stored, converted only or float.

In each of these small programs a weight is read in another way; `test_wild` has whole
models. They are traced, and none is compiled.
"""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax import nnx

import tcfp_jax
from tcfp_jax.conversion import find_weights, survey
from tests.conversion import programs
from tests.helpers import parametrize
from tests.wild.kinds import differences, kinds
from tests.wild.low import ALL, RECIPE, convert
from tests.wild.made import WIDTH, Made, Subject, floats, linen_made, nnx_made, pure
from tests.wild.subjects import SUBJECTS

FUNCTIONS = {
    function.__name__: (function, inputs)
    for function, inputs in [
        (programs.dense, programs.X),
        (programs.with_penalty, programs.X),
        (programs.with_norm, programs.X),
        (programs.with_decayed_copy, programs.X),
        (programs.with_a_choice, programs.X),
        (programs.with_orthogonality, programs.X),
        (programs.with_gram_matrix, programs.X),
        (programs.halves, programs.X),
        (programs.tied, programs.X),
        (programs.queries, programs.X),
        (programs.positions, programs.X),
        (programs.mixing, programs.X),
        (programs.scan_from_zeros, programs.STEPS),
        (programs.scan_from_a_parameter, programs.STEPS),
        (programs.unrolled_from_zeros, programs.STEPS),
        (programs.unrolled_from_ones, programs.STEPS),
        (programs.unrolled_from_a_parameter, programs.STEPS),
        (programs.scaled, programs.X),
        (programs.activated, programs.X),
        (programs.layers, programs.X),
        (programs.state_alone, programs.X),
        (programs.nested, programs.STEPS),
        (programs.while_from_zeros, programs.X),
        (programs.gated, programs.STEPS),
        (programs.memory, programs.X),
        (programs.own_derivative, programs.X),
        (programs.penalties, programs.X),
        (programs.logged_in_a_scan, programs.X),
        (programs.averaged, programs.X),
        (programs.branches, programs.X),
    ]
}


class NnxNet(nnx.Module):
    def __init__(self, cell: type, rngs: nnx.Rngs) -> None:
        self.rnn = nnx.RNN(cell(WIDTH, 16, rngs=rngs))
        self.out = nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.rnn(x))


def modules() -> dict[str, tuple[str, Callable[[], Made]]]:
    """Return recurrent nets, and modules with state, by name."""
    sequence = floats(2, 4, WIDTH)
    x = floats(4, WIDTH)
    found: dict[str, tuple[str, Callable[[], Made]]] = {}
    for cell in (nn.SimpleCell, nn.GRUCell, nn.LSTMCell, nn.OptimizedLSTMCell):
        found[f"linen {cell.__name__}"] = (
            "linen",
            lambda cell=cell: linen_made(nn.RNN(cell(16)), sequence),
        )
    for cell in (nnx.SimpleCell, nnx.GRUCell, nnx.LSTMCell, nnx.OptimizedLSTMCell):
        found[f"nnx {cell.__name__}"] = (
            "nnx",
            lambda cell=cell: nnx_made(lambda rngs: NnxNet(cell, rngs), sequence),
        )
    changes = dict(mutable=["memory", "batch_stats"])
    for module in (programs.LinenCell(), programs.Spectral()):
        found[f"linen {type(module).__name__}"] = (
            "linen",
            lambda module=module: linen_made(module, x, apply_options=changes),
        )
    found["nnx cell with state"] = ("nnx", lambda: nnx_made(programs.NnxCell, x))
    return found


MODULES = modules()


def test_there_are_forty_programs():
    always = [subject for subject in SUBJECTS if not subject.packages]
    assert len({*FUNCTIONS, *MODULES, *map(str, always)}) >= 40


@parametrize("name", FUNCTIONS)
def test_the_report_of_a_function_is_what_another_count_finds(name):
    function, x = FUNCTIONS[name]
    low = tcfp_jax.transform(function, RECIPE, include=ALL)
    report = survey(low, programs.P, x)
    assert differences(report, kinds(function, programs.P, x)) == {}
    weights = find_weights(low, programs.P, x)
    kept = {path for path, one in weights.items() if one.float_reads == "none"}
    assert kept == {line.path for line in report.parameters if line.kind == "stored"}


@parametrize("name", MODULES)
def test_the_report_of_a_module_is_what_another_count_finds(name):
    kind, make = MODULES[name]
    made = make()
    with made.context():
        fn, params, inputs = pure(made, kind)
        counted = kinds(fn, params, *inputs)
        low = convert(Subject(name, kind, make, (0, 0)), made)
        assert differences(low.report, counted) == {}
