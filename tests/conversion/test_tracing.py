"""Products of parameters found in a program, through loops and branches."""

import jax
import jax.numpy as jnp

from tcfp_jax.conversion.transform import transform

W, X = jnp.ones((3, 3)), jnp.ones((2, 3))


def found(function, *arrays):
    """(Parameters, by position, that are multiplied as a recipe says, those that are left alone and why)."""
    *params, x = arrays
    names = {str(i): leaf for i, leaf in enumerate(params)}
    low = transform(lambda params, x: function(*params.values(), x), "tcfp12", include=("linear", "small", "head"))
    report = low.examine(names, x).report
    return [record.weight_path for record in report.converted], [record.reason for record in report.skipped]


def test_what_is_a_product_of_a_parameter():
    converted, (reason,) = found(lambda w, x: (x + 1) @ (2 * w.T).astype(jnp.float32), W, X)
    assert converted == [] and "computed" in reason
    assert found(lambda w, x: (x + 1) @ w.T.astype(jnp.float32), W, X) == (["0"], [])
    assert found(lambda w, x: (x + w[0]) @ jnp.ones((3, 3)), W, X) == ([], [])  # an activation times a constant
    assert found(lambda w, x: (x @ x.T) * w[:2, :2], W, X) == ([], [])


def test_loops_and_branches_are_walked():
    def carried(w, b, x):
        # The weight enters the product through the carry, and the input reaches it in the second round only.
        body = lambda c, _: ({"x": c["x"] @ c["w"], "n": (c["n"][0] + 1,), "w": c["w"]}, c["x"].sum())
        return jax.lax.scan(body, {"x": x, "n": (b,), "w": w}, jnp.zeros(3))

    assert found(carried, W, jnp.float32(0), X)[0] == ["0"]
    late = lambda w, x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, x @ w + c[1]), (0, x))
    assert found(late, W, X)[0] == ["0"]
    branch = lambda w, x: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x)
    assert found(branch, W, X)[0] == ["0"]
    assert found(jax.checkpoint(jax.jit(lambda w, x: x @ w)), W, X)[0] == ["0"]
    stacked = lambda w, x: jax.lax.scan(lambda c, w: (c @ w, None), x, jnp.stack([w, w]))
    converted, reasons = found(stacked, W, X)
    assert len(converted) + len(reasons) == 1
