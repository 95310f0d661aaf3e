"""Subjects in plain Flax, as users write models, with every way from a weight to its
product.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from tests.wild.made import (
    VOCABULARY,
    WIDTH,
    Made,
    floats,
    linen_made,
    nnx_made,
    subject,
    tokens,
)

HIDDEN = 64


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        y = nn.RMSNorm()(x)
        y = nn.silu(nn.Dense(HIDDEN, name="gate")(y)) * nn.Dense(HIDDEN, name="up")(y)
        return x + nn.Dense(WIDTH, name="down")(y), None


class Scanned(nn.Module):
    axis: int = 0

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(VOCABULARY, WIDTH)(ids)
        stack = nn.scan(
            nn.remat(Mlp),
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = stack()(x, None)
        return nn.Dense(VOCABULARY, name="out")(nn.RMSNorm()(x))


subject("linen scan and remat", "linen", (4, 4))(
    lambda: linen_made(Scanned(), tokens())
)
subject("linen scan on axis 1", "linen", (4, 4))(
    lambda: linen_made(Scanned(axis=1), tokens())
)


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(WIDTH, kernel_init=init)(
            nn.relu(nn.Dense(HIDDEN, kernel_init=init)(x))
        )


subject("linen boxed", "linen", (2, 2), target="square")(
    lambda: linen_made(Boxed(), floats(16, WIDTH))
)


class Experts(nn.Module):
    """Experts for every token, weighted by a router: by `nn.vmap`, or by einsum over a
    raw parameter.
    """

    by: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        shares = nn.softmax(nn.Dense(4, use_bias=False, name="router")(x))
        if self.by == "vmap":
            many = nn.vmap(
                nn.Dense,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=None,
                out_axes=1,
                axis_size=4,
            )
            y = many(WIDTH, name="experts")(x)
        else:
            up = self.param("up", nn.initializers.lecun_normal(), (4, WIDTH, HIDDEN))
            down = self.param(
                "down", nn.initializers.lecun_normal(), (4, HIDDEN, WIDTH)
            )
            y = jnp.einsum(
                "tef,efd->ted", nn.relu(jnp.einsum("td,edf->tef", x, up)), down
            )
        return x + jnp.einsum("te,ted->td", shares, y)


for way, total in (("vmap", 2), ("einsum", 3)):
    subject(f"linen experts by {way}", "linen", (total, total), target="square")(
        lambda way=way: linen_made(Experts(way), floats(16, WIDTH))
    )


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, ids: Any) -> Any:
        return nn.Dense(VOCABULARY)(
            nn.RNN(nn.LSTMCell(WIDTH))(nn.Embed(VOCABULARY, WIDTH)(ids))
        )


# Each of four gates multiplies the input and the state, in the body of a scan.
subject("linen LSTM", "linen", (9, 9), rate=1e-2)(
    lambda: linen_made(Recurrent(), tokens())
)


class Normalized(nn.Module):
    norm: Any

    @nn.compact
    def __call__(self, x: Any, **options: Any) -> Any:
        return nn.Dense(WIDTH)(nn.relu(self.norm(nn.Dense(HIDDEN))(x, **options)))


subject("linen WeightNorm", "linen", (2, 2), target="square")(
    lambda: linen_made(Normalized(nn.WeightNorm), floats(16, WIDTH))
)
subject("linen SpectralNorm", "linen", (2, 2), target="square")(
    lambda: linen_made(
        Normalized(nn.SpectralNorm), floats(16, WIDTH), options=dict(update_stats=False)
    )
)


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(16, (3, 3))(x)))
        x = nn.Dense(HIDDEN)(x.reshape(x.shape[0], -1))
        return nn.Dense(8)(nn.Dropout(0.1, deterministic=not train)(nn.relu(x)))


@subject("linen convnet", "linen", (2, 3), rate=3e-4)
def convnet() -> Made:
    changes = dict(mutable=["batch_stats"], rngs={"dropout": jax.random.key(2)})
    return linen_made(
        ConvNet(),
        floats(16, 6, 6, 3),
        options=dict(train=True),
        apply_options=changes,
        select=lambda output: output[0],
    )


class Attend(nn.Module):
    @nn.compact
    def __call__(self, ids: Any) -> Any:
        embed = nn.Embed(VOCABULARY, WIDTH)
        x = embed(ids)
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(
            y, mask=nn.make_causal_mask(ids)
        )
        return embed.attend(nn.LayerNorm()(x))


subject("linen attention, tied", "linen", (5, 5))(
    lambda: linen_made(Attend(), tokens())
)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.down(nnx.silu(self.up(self.norm(x))))


class Stack(nnx.Module):
    """Blocks made by `nnx.vmap` and run by `nnx.scan` of a rematerialized call, between
    a lookup and a head.
    """

    def __init__(self, rngs: nnx.Rngs, remat: bool = False) -> None:
        self.table = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.vmap(Block, in_axes=0, axis_size=3)(rngs.fork(split=3))
        self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)
        self.remat = remat

    def __call__(self, ids: Any) -> Any:
        def call(block, x):
            return block(x)

        if self.remat:
            call = nnx.remat(call)
        step = nnx.scan(
            lambda x, block: call(block, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return self.out(step(self.table(ids), self.blocks))


subject("nnx scan", "nnx", (3, 3))(lambda: nnx_made(Stack, tokens()))
subject("nnx scan and remat", "nnx", (3, 3))(
    lambda: nnx_made(functools.partial(Stack, remat=True), tokens())
)


class Ensemble(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.members = nnx.vmap(Block, in_axes=0, axis_size=4)(rngs.fork(split=4))

    def __call__(self, x: Any) -> Any:
        return nnx.vmap(lambda block, x: block(x), in_axes=(0, None))(
            self.members, x
        ).mean(0)


subject("nnx vmap", "nnx", (2, 2), target="square")(
    lambda: nnx_made(Ensemble, floats(16, WIDTH))
)


class Adapted(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.LoRA(
            WIDTH,
            4,
            HIDDEN,
            base_module=nnx.Linear(WIDTH, HIDDEN, rngs=rngs),
            rngs=rngs,
        )
        self.second = nnx.LoRALinear(HIDDEN, WIDTH, lora_rank=4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(nnx.relu(self.first(x)))


subject("nnx LoRA", "nnx", (6, 6), target="square")(
    lambda: nnx_made(Adapted, floats(16, WIDTH))
)


class Shared(nnx.Module):
    """One Param in two layers, and a product of a raw one that is not called kernel."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.b = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.b.kernel = self.a.kernel
        self.projection = nnx.Param(
            nnx.initializers.lecun_normal()(rngs.params(), (WIDTH, 4, 8))
        )

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.b(nnx.relu(self.a(x))))
        return jnp.einsum("td,dnh->tnh", x, self.projection[...])


subject("nnx shared Param, raw Param", "nnx", (3, 3), target="square")(
    lambda: nnx_made(Shared, floats(16, WIDTH))
)


class Scaled(nnx.Embed):
    """A table whose lookup is scaled."""

    def __call__(self, ids: Any) -> Any:
        return super().__call__(ids) * WIDTH**0.5


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, table: type[nnx.Embed] = nnx.Embed) -> None:
        self.table = table(VOCABULARY, WIDTH, rngs=rngs)
        self.block = Block(rngs)

    def __call__(self, ids: Any) -> Any:
        return self.table.attend(self.block(self.table(ids)))


subject("nnx tied", "nnx", (3, 3))(lambda: nnx_made(Tied, tokens()))
subject("nnx tied, Embed subclass", "nnx", (3, 3))(
    lambda: nnx_made(functools.partial(Tied, table=Scaled), tokens())
)
