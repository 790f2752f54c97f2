"""Elementwise functions of register arrays, inlined into a Pallas kernel as the code of a thread.

Mosaic GPU infers a layout for every array of a kernel, in Python and in a time that grows with the
square of their number: a thousand arrays take ten seconds at every start of an engine. Where all
layouts are known, `inline` makes a whole function one operation of the kernel instead. The function
stays an ordinary function of arrays, and the interpreter runs it as it is. On a GPU its jaxpr is
written out register by register, with the same instructions that its operations would have become
one by one.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend import core

from pallas_kernels.hopper import compat

Fragment = fragmented_array.FragmentedArray


def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns `function(*arguments)`, computed by code of a thread.

    Arguments and results of two dimensions have the layout of a wgmma accumulator. Arguments of one
    dimension lie along its rows, and arguments may also be scalars. exp and log are approximate, as
    in all our kernels. Raises NotImplementedError for an operation that is not in the table here.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    leaves, (results, structure) = jax.tree.leaves(arguments), jax.tree.flatten(shapes)
    layouts = (plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA)

    @compat.inline_mgpu(
        arg_types=tuple(layouts[leaf.ndim] for leaf in leaves),
        return_type=tuple(
            plgpu.ShapeDtypeStruct(result.shape, result.dtype, layout=plgpu.Layout.WGMMA)
            for result in results
        ),
    )
    def run(_, *fragments):
        return tuple(_evaluate(closed.jaxpr, closed.consts, fragments))

    return structure.unflatten(run(*leaves))


def _evaluate(
    jaxpr: core.Jaxpr, constants: Sequence[Any], arguments: Sequence[Fragment]
) -> list[Fragment]:
    """Returns the results of a jaxpr."""
    known: dict[Any, Fragment] = dict(zip(jaxpr.invars, arguments, strict=True))
    for variable, constant in zip(jaxpr.constvars, constants, strict=True):
        known[variable] = _constant(constant, variable.aval)

    def read(variable: core.Var | core.Literal) -> Fragment:
        if isinstance(variable, core.Literal):
            return _constant(variable.val, variable.aval)
        return known[variable]

    for equation in jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        if equation.primitive.name in ("jit", "pjit"):  # such as jnp.where
            inner = equation.params["jaxpr"]
            results = _evaluate(inner.jaxpr, inner.consts, operands)
        else:
            results = [_operation(equation, operands)]
        known.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _constant(value: Any, aval: Any) -> Fragment:
    assert not aval.shape, "arrays must be arguments"
    # A Python number: numpy's are no operands of MLIR.
    number = mgpu_utils.c(np.asarray(value).item(), mgpu_utils.dtype_to_ir_type(aval.dtype))
    return Fragment.splat(number, (), is_signed=mgpu_utils.is_signed(aval.dtype))


def _operation(equation: core.JaxprEqn, operands: list[Fragment]) -> Fragment:
    result, name = equation.outvars[0].aval, equation.primitive.name
    assert isinstance(result, ShapedArray)
    if name in _OPERATIONS:
        return _OPERATIONS[name](*operands)
    element = mgpu_utils.dtype_to_ir_type(result.dtype)
    is_signed = mgpu_utils.is_signed(result.dtype)
    match name:
        case "convert_element_type":
            return operands[0].astype(element, is_signed=is_signed)
        case "broadcast_in_dim":
            return _broadcast(operands[0], result.shape, equation.params["broadcast_dimensions"])
        case "layout_cast":  # arrays of a rank have one layout here
            return operands[0]
        case "slice":
            starts, limits = equation.params["start_indices"], equation.params["limit_indices"]
            return operands[0][tuple(map(slice, starts, limits))]
        case "iota":
            return Fragment.broadcasted_iota(
                element,
                result.shape,
                equation.params["dimension"],
                fragmented_array.WGMMA_LAYOUT,
                is_signed=is_signed,
            )
        case _:
            raise NotImplementedError(f"{name} in a function of registers: {equation}")


def _broadcast(operand: Fragment, shape: tuple[int, ...], dimensions: tuple[int, ...]) -> Fragment:
    if not dimensions:
        return Fragment.splat(
            operand.registers.item(),
            shape,
            fragmented_array.WGMMA_LAYOUT,
            is_signed=operand.is_signed,
        )
    return operand.broadcast_in_dim(shape, dimensions, fragmented_array.WGMMA_LAYOUT)


def _shift_right_logical(operand: Fragment, count: Fragment) -> Fragment:
    if operand.is_signed:  # the shift would be arithmetic
        raise NotImplementedError("shift_right_logical of signed numbers")
    return operand >> count


# By name of the primitive. Comparisons are signed where the operands are.
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "xor": operator.xor,
    "and": operator.and_,
    "or": operator.or_,
    "shift_right_logical": _shift_right_logical,
    "gt": operator.gt,
    "lt": operator.lt,
    "eq": operator.eq,
    "max": lambda x, y: x.max(y),
    "min": lambda x, y: x.min(y),
    "exp": lambda x: x.exp(approx=True),
    "log": lambda x: x.log(approx=True),
    "select_n": lambda condition, no, yes: condition.select(yes, no),
}
