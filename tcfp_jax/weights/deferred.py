"""`Deferred`: a stack of stored parameters, or one entry of it, whose arrays are
elsewhere and are read where a product asks for them.

A scan over a stack of weights reads one entry in each round. In
`tcfp_jax.train_step` the optimizer writes this entry as soon as its gradient is there,
so the stack lives in references of JAX, and the tree of parameters holds a `Deferred`
in its place: the numbers of the layers, which any scan cuts as it cuts arrays. An entry
reads its values where a product asks for them. Code that computes with all arrays of
the tree meets random keys, too, on which JAX refuses arithmetic.

Left out: the references and their updates (`tcfp_jax.optim.slots`).
"""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import set_current_trace

from tcfp_jax.weights.parameter import Parameter
from tcfp_jax.weights.stored import Stored
from tcfp_jax.weights.training import Training


class Home(Protocol):
    """Where the arrays of a stack are; compared by identity.

    Attributes:
      whole: the whole parameter, as shapes.
      stacked: whether it is a stack that a scan runs over.
    """

    whole: Parameter
    stacked: bool

    def read(self, index: Array) -> Stored:
        """Return the values of the entry at an index; of all if that is `[layers]`, or
        if the parameter is not a stack.
        """
        ...

    def slot(self, index: Array, zero: Array) -> Array:
        """Return the zeros that take the gradient of `read`'s result, in its shape."""
        ...


class Slots:
    """The slots of entries: one for all uses of an entry, so that JAX adds their
    gradients.
    """

    def __init__(self) -> None:
        # The index is kept, so that no other one gets its id.
        self._made: dict[int, tuple[Array, Array]] = {}

    def find(self, index: Array, zero: Array, make: Callable[[], Array]) -> Array:
        """Return the slot of an entry.

        A function inside of a layer may be the first that reads the entry, such as one
        in `jax.checkpoint`. The slot belongs to the layer, whose later parts read it.
        """
        if id(index) not in self._made:
            with _program_of(zero, index):
                self._made[id(index)] = (index, make())
        return self._made[id(index)][1]


def _program_of(*arrays: Array) -> contextlib.AbstractContextManager[None]:
    """Return the context that traces into the program to which arrays belong."""
    for x in arrays:
        if isinstance(x, jax.core.Tracer):
            context: contextlib.AbstractContextManager[None]
            context = set_current_trace(x._trace)
            return context
    return contextlib.nullcontext()


class Deferred(Parameter):
    """A stack of parameters, or one entry of it, that is read where it is used.

    `tcfp_jax.train_step` makes it for the loss function; no tree of yours holds it.

    * `index` is int32 `[layers]` for a stack, and a scalar for one entry. A parameter
      that is not a stack has a scalar, too.
    * Only one entry takes a gradient. It goes to `home.slot`, as the one of `zero`.

    Attributes:
      index: the numbers of the entries.
      zero: float32 zeros of the same shape. JAX runs the rule of a slot only if
        something that is differentiated goes into it.
      keys: random keys of the same shape, on which arithmetic raises.
      home: where the arrays are.
    """

    index: Array
    zero: Array
    keys: Array
    home: Home

    def __init__(self, index: Array, zero: Array, keys: Array, home: Home) -> None:
        vars(self).update(index=index, zero=zero, keys=keys, home=home)

    @property
    def is_stack(self) -> bool:
        """True for a whole stack, which has no gradient yet."""
        return self.index.ndim > 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stored matrix, `[*stack, k, n]`."""
        whole = self.home.whole.shape
        return whole[1:] if self.home.stacked and not self.is_stack else whole

    @property
    def dtype(self) -> jnp.dtype:
        """The format of the values."""
        return self.home.whole.dtype

    @property
    def stored(self) -> Stored:
        """The values, which this reads."""
        if not self.is_stack:
            # In front of each read, so that the update in the backward pass follows
            # the last one, with a gradient or without.
            self.matrix_slot()
        return self.values()

    def values(self) -> Stored:
        """Return the values, for code that has made the slot before."""
        return self.home.read(self.index)

    @property
    def state(self) -> Training:
        """The state of the whole stack, as shapes; of one entry, with its slot."""
        if self.is_stack:
            return self.described
        slot = self.layout.kernel(self.matrix_slot(), self.kernel_shape)
        return replace(
            self.described, rounding=None, error=None, sample=None, slot=slot
        )

    @property
    def described(self) -> Training:
        """The state of the stack, as shapes."""
        return self.home.whole.state

    def matrix_slot(self) -> Array:
        """Return the zeros `[*stack, k, n]` that take the gradient."""
        return self.home.slot(self.index, self.zero)

    def read(self) -> Stored:
        """Return the values as products read them."""
        return self.stored

    def intact(self) -> Parameter:
        """Return the parameter with its arrays; `train_step` has looked at the
        codes.
        """
        return self if self.is_stack else Parameter(self.stored, self.state)


def _children(entry: Deferred) -> tuple[tuple[Array, Array, Array], Home]:
    return (entry.index, entry.zero, entry.keys), entry.home


def _entry(home: Home, children: Iterable[Array]) -> Deferred:
    index, zero, keys = children
    return Deferred(index, zero, keys, home)


jax.tree_util.register_pytree_node(Deferred, _children, _entry)  # type: ignore[type-var]
