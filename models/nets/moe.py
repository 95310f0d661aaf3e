"""A decoder-only Transformer whose MLPs are mixtures of experts: a router sends each
token to a few of many SwiGLUs.

    p = softmax(W_router n)  float32  n = RMSNorm(x)
    x = x + sum over the chosen e of p[e] W_down[e] (silu(W_gate[e] n) * W_up[e] n)
        [+ a shared SwiGLU of n]

It is a `models.nets.llama` otherwise, in plain Flax without low precision. Tokens are
sorted by expert and multiplied by `lax.ragged_dot`, so that none is dropped. The
gradients of the sort and of its inverse are gathers, too, because a scatter adds in
another order each time. Two penalties change gradients, but not the losses that the
model returns:

    balance = E sum over e of (share of choices that are e) * (mean of p[e])
        z = mean of logsumexp(W_router n)**2

Sources: Muennighoff et al. 2024, "OLMoE"; Yang et al. 2025, "Qwen3 Technical Report";
Fedus et al. 2021, "Switch Transformers" (balance); Zoph et al. 2022, "ST-MoE" (z).
"""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from .keeping import CHOICE
from .llama import Block, Llama, Matrix, gated, initial
from .meshes import AXES, BATCH
from .shapes import MoeConfig, Nonlinearity


class Routed(NamedTuple):
    """Choices of a router for t tokens: experts, int32 `[t, chosen]`, their float32
    weights, and the penalty.
    """

    chosen: jax.Array
    weights: jax.Array
    penalty: jax.Array


@jax.custom_vjp
def score(x: jax.Array, router: jax.Array) -> jax.Array:
    """Return logits, float32 `[t, experts]`, of tokens `[t, width]` and the matrix of a
    router.

    Choices are not continuous, so they take float32. Gradients take TF32, the default
    of GPUs, in a third of the time.

    >>> score(jnp.ones((1, 2), jnp.bfloat16), jnp.eye(2)).tolist()
    [[1.0, 1.0]]
    """
    return jnp.matmul(x.astype(jnp.float32), router, precision=lax.Precision.HIGHEST)


def _score_back(
    residuals: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, router = residuals
    return (g @ router.T).astype(x.dtype), x.astype(g.dtype).T @ g


score.defvjp(lambda x, router: (score(x, router), (x, router)), _score_back)


def route(logits: jax.Array, config: MoeConfig) -> Routed:
    """Return the choices for the logits of a router, float32 `[t, experts]`.

    >>> sizes = dict(width=2, heads=1, kv_heads=1, hidden=1, context=1)
    >>> config = MoeConfig(layers=1, experts=3, **sizes)
    >>> probabilities = jnp.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])
    >>> route(jnp.log(probabilities), config).chosen.tolist()
    [[2, 1], [0, 1]]
    """
    probabilities = jax.nn.softmax(logits)
    chosen = checkpoint_name(
        lax.top_k(lax.stop_gradient(probabilities), config.chosen)[1], CHOICE
    )
    # Masks instead of indices: the gradient of a masked sum is not a scatter, and both
    # fuse.
    is_chosen = chosen[..., None] == jnp.arange(config.experts)
    weights = jnp.sum(jnp.where(is_chosen, probabilities[:, None], 0.0), axis=-1)
    if config.normalized == "chosen":
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    balance = config.experts * jnp.sum(
        jnp.mean(is_chosen, axis=(0, 1)) * jnp.mean(probabilities, axis=0)
    )
    z_loss = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    return Routed(chosen, weights, config.balance * balance + config.z_loss * z_loss)


def mix(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    first: jax.Array | int,
    activation: Nonlinearity,
) -> jax.Array:
    """Return the sum over some experts, the ones from number `first` on, float32
    `[t, width]`.

    Args:
      x: Tokens `[t, width]`.
      chosen, weights: Fields of `Routed`. Experts that are not among these add nothing.
      gate_up, down: Matrices `[experts, width, 2 hidden]` and
        `[experts, hidden, width]`.
      first: Number of the first expert.
      activation: As in `LlamaConfig`.
    """
    own = chosen.reshape(-1) - first
    experts = len(gate_up)
    # sorted behind the last group, where rows are zero
    own = jnp.where((own >= 0) & (own < experts), own, experts)
    sizes = jnp.sum(own[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    order = jnp.argsort(own)
    place = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    )
    rows = dispatch(x, order, place)
    gate, up = jnp.split(
        lax.ragged_dot(rows, gate_up.astype(x.dtype), sizes), 2, axis=-1
    )
    # Before the last product, whose result the gradient of the weights then does not
    # need.
    of_rows = collect(weights.reshape(-1, 1), place, order)
    hidden = (gated(gate, up, activation) * of_rows).astype(x.dtype)
    out = collect(lax.ragged_dot(hidden, down.astype(x.dtype), sizes), order, place)
    return jnp.sum(out.reshape(*chosen.shape, -1), axis=1, dtype=jnp.float32)


def mix_on_mesh(
    x: jax.Array,
    routed: Routed,
    gate_up: jax.Array,
    down: jax.Array,
    activation: Nonlinearity,
) -> jax.Array:
    """Return `mix` over all experts.

    On a mesh of `models.nets.meshes` each device of `fsdp` multiplies its own experts.

    The devices along `fsdp` gather their tokens and add up their sums, so that no
    weight travels.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names != AXES or mesh.size == 1:
        return mix(x, routed.chosen, routed.weights, gate_up, down, 0, activation)

    def of_device(
        x: jax.Array,
        chosen: jax.Array,
        weights: jax.Array,
        gate_up: jax.Array,
        down: jax.Array,
    ) -> jax.Array:
        x, chosen, weights = (
            lax.all_gather(array, "fsdp", tiled=True) for array in (x, chosen, weights)
        )
        first = lax.axis_index("fsdp") * len(gate_up)
        return lax.psum_scatter(
            mix(x, chosen, weights, gate_up, down, first, activation),
            "fsdp",
            tiled=True,
        )

    specs = (*[BATCH] * 3, *[P("fsdp")] * 2)
    return jax.shard_map(of_device, in_specs=specs, out_specs=BATCH)(
        x, routed.chosen, routed.weights, gate_up, down
    )


@jax.custom_vjp
def dispatch(x: jax.Array, order: jax.Array, place: jax.Array) -> jax.Array:
    """Return tokens `[t, width]` as rows `[t * chosen, width]`, sorted by expert.

    >>> x = jnp.array([[1.0], [2.0]])
    >>> order = jnp.array([2, 1, 3, 0])
    >>> place = jnp.array([3, 1, 0, 2])
    >>> dispatch(x, order, place)[:, 0].tolist()
    [2.0, 1.0, 2.0, 1.0]
    """
    return _rows(x, order // (order.size // len(x)))


def _dispatch_back(
    residuals: tuple[jax.Array, int], g: jax.Array
) -> tuple[jax.Array, None, None]:
    place, tokens = residuals
    of_tokens = _rows(g, place).reshape(tokens, -1, g.shape[-1])
    return jnp.sum(of_tokens, axis=1, dtype=jnp.float32).astype(g.dtype), None, None


dispatch.defvjp(
    lambda x, order, place: (dispatch(x, order, place), (place, len(x))), _dispatch_back
)


@jax.custom_vjp
def collect(rows: jax.Array, order: jax.Array, place: jax.Array) -> jax.Array:
    """Return rows in the order of their tokens again.

    >>> rows = jnp.array([[2.0], [1.0], [2.0], [1.0]])
    >>> order = jnp.array([2, 1, 3, 0])
    >>> place = jnp.array([3, 1, 0, 2])
    >>> collect(rows, order, place)[:, 0].tolist()
    [1.0, 1.0, 2.0, 2.0]
    """
    return _rows(rows, place)


collect.defvjp(
    lambda rows, order, place: (collect(rows, order, place), order),
    lambda order, g: (_rows(g, order), None, None),
)


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    return x.at[index].get(mode="promise_in_bounds")


class MoeBlock(Block):
    """A block of a Llama with a mixture of experts as its MLP; with
    `mutable="intermediates"` it tells its choices.
    """

    config: MoeConfig

    def _mlp(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        flat = x.reshape(-1, x.shape[-1])
        router = Matrix(
            (config.width, config.experts), initial(config), name="router"
        )()
        routed = route(checkpoint_name(score(flat, router), CHOICE), config)
        self.sow("intermediates", "chosen", routed.chosen)
        gate_up = Matrix(
            (config.experts, config.width, 2 * config.hidden),
            initial(config),
            name="expert_gate_up",
        )()
        down = Matrix(
            (config.experts, config.hidden, config.width),
            initial(config, "residual"),
            name="expert_down",
        )()
        y = mix_on_mesh(flat, routed, gate_up, down, config.activation).astype(x.dtype)
        shared = self._swiglu(x, config.shared) if config.shared else 0
        return y.reshape(x.shape) + shared, routed.penalty


class Moe(Llama):
    """A `Llama` with a mixture of experts in each block; the penalties add to the
    gradient of its losses.
    """

    block: ClassVar[type[Block]] = MoeBlock
    config: MoeConfig
