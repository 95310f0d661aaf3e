"""Arguments of an optimizer that hold something else, such as parameters for gradients.

Parameters, gradients, updates and moments are trees of the same names. If one is given
instead of another, JAX's own errors name neither the argument nor the remedy, and print
whole arrays.
"""

from numbers import Number
from typing import NamedTuple

import jax

from tcfp_jax.paths import PyTree, leaves, named_leaves
from tcfp_jax.weights.parameter import is_quantized
from tcfp_jax.weights.rewritten import Rewritten


class Argument(NamedTuple):
    """An argument whose tree is that of the parameters.

    Attributes:
      name: a plural, with the place of the argument.
      belongs: the end of messages, which says what belongs there.
    """

    name: str
    belongs: str

    def leaves(self, treedef: jax.tree_util.PyTreeDef, tree: PyTree) -> list[PyTree]:
        """Return the leaves of the tree, one for each leaf of the parameters.

        Raises:
          ValueError: the tree has another structure.
        """
        try:
            found: list[PyTree] = treedef.flatten_up_to(tree)
        except ValueError:
            numbered = treedef.unflatten(range(treedef.num_leaves))
            difference = _difference(numbered, tree)
            message = f"the {self.name}, {difference}; {self.belongs}"
            raise ValueError(message) from None  # JAX's would print the arrays
        return found

    def pairs(self, params: PyTree, tree: PyTree) -> list[tuple[str, PyTree, PyTree]]:
        """Return path, parameter and leaf of the tree for each parameter."""
        found, treedef = named_leaves(params, is_whole)
        return [
            ("/".join(names), parameter, leaf)
            for (names, parameter), leaf in zip(
                found, self.leaves(treedef, tree), strict=True
            )
        ]

    def check_tree(self, params: PyTree) -> None:
        """Raise a ValueError if a leaf is neither stored nor an array of numbers."""
        for path, leaf in leaves(params, is_quantized).items():
            if not is_quantized(leaf):
                self.check_floats(path, leaf)

    def check_floats(self, path: str, leaf: PyTree) -> None:
        """Raise a ValueError if the leaf at a path is not an array of numbers."""
        if is_quantized(leaf):
            held = "a stored weight"
        elif isinstance(leaf, Rewritten):
            held = "the update of a stored weight"
        elif leaf is None:
            held = "None"
        elif not hasattr(leaf, "dtype") and not isinstance(leaf, Number):
            held = f"an object of type {type(leaf).__name__}"
        else:
            return
        place = f" at {path}" if path else ""
        raise ValueError(
            f"the {self.name}, hold {held}{place}, where floats belong; {self.belongs}"
        )


GRADIENTS = Argument(
    "gradients, first argument of tx.update",
    "pass the gradients, the second result of tcfp_jax.value_and_grad (NNX:"
    " tcfp_jax.nnx.value_and_grad)",
)
MOMENTS = Argument(
    "moments, in the state of tx.update",
    "pass the state that tx.init(params) made for these parameters",
)
PARAMETERS = Argument(
    "parameters, argument of tx.init and the third of tx.update",
    "pass the tree of the model's parameters",
)
TO_STORE = Argument(
    "parameters, first argument of store",
    "call store(params, recipe) with the tree of the model's float parameters",
)
UPDATED = Argument(
    "parameters, first argument of apply_updates",
    "call apply_updates(params, updates) with the parameters before the update",
)
UPDATES = Argument(
    "updates, second argument of apply_updates",
    "call apply_updates(params, updates) with the updates of tx.update, which returns"
    " (updates, state), and the parameters that it was given; an optimizer of optax"
    " needs tcfp_jax.optim.on_stored(tx)",
)
AVERAGED = Argument(
    "new parameters, first argument of incremental_update",
    "call incremental_update(new, old, step_size) with two trees of parameters",
)


def check_made(state: object, kind: type, maker: str) -> None:
    """Raise a TypeError unless a state is of the class that an optimizer makes."""
    if not isinstance(state, kind):
        raise TypeError(
            f"the state is of type {type(state).__name__}, not {maker}'s; pass the one"
            " that this tx.init made, as tx.update(gradients, state, params)"
        )


def is_whole(node: object) -> bool:
    """Return whether a node is one leaf of parameters, gradients or updates."""
    return node is None or is_quantized(node) or isinstance(node, Rewritten)


def _difference(params: PyTree, tree: PyTree) -> str:
    """Return how the structure of a tree differs from that of the parameters."""
    given = type(tree).__name__
    own = type(params).__name__
    if given != own:
        return f"are of type {given}, but the parameters of type {own}"
    wanted = set(leaves(params))
    names = set(leaves(tree, is_whole))
    if wanted - names:
        return f"have no {min(wanted - names)}, which is a parameter"
    if names - wanted:
        return f"have {min(names - wanted)}, which is not a parameter"
    return "have the names of the parameters in other containers"
