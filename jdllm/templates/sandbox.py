"""A Jinja environment for templates that nobody here has read: bounded in time and memory.

It is jinja2's immutable sandbox with the globals and filters that Hugging Face's chat templates
use, so a template renders to the same text as in transformers. Beyond the sandbox, every loop
step, call, filter and piece of text is charged to the budget of `limits`, and each charge looks
at a deadline. Filters for HTML pages and debugging, which no prompt needs, do not exist here.

What remains: one operation on values within the budget (such as sorting a list of some million
entries) is not interrupted, so a render may pass its deadline by about a second; and it may hold
about as much memory as its budget has characters.
"""

from __future__ import annotations

import datetime
import functools
import json
import types
from collections.abc import Callable, Sized
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes, parser, runtime, sandbox, utils, visitor

from jdllm.templates import budget

LEFT_OUT = ("pprint", "random", "urlize", "xmlattr")
# Names of filters that no template can write.
_STEP, _CONCATENATE, _SIZED = "@step", "@concatenate", "@sized"


class _Charging(visitor.NodeTransformer):
    """Adds charges to the tree of a template; what the template writes stays the same."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_step(budget.STEP), lineno=node.lineno))
        if node.test is not None:  # entries that the test drops are steps, too
            node.test = nodes.Or(_step(budget.STEP), node.test, lineno=node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        size = sum(len(one.data) for one in node.nodes if isinstance(one, nodes.TemplateData))
        if size:
            node.nodes.insert(0, _step(size))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCATENATE)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, _SIZED) if isinstance(node.arg, nodes.Slice) else node


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _step(units: int) -> nodes.Filter:
    return _filter(nodes.Const(units), _STEP)


class _GenerationTag(jinja2.ext.Extension):
    """Reads `{% generation %}`, which marks what the assistant wrote; the text stays the same."""

    tags = {"generation"}  # noqa: RUF012 (the name and type that jinja2 reads)

    def parse(self, parser: parser.Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class Environment(sandbox.ImmutableSandboxedEnvironment):
    """The environment of all chat templates; compile and render inside `budget.limits`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # what the optimiser folds would run when compiled
            finalize=_finalize,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self.filters["tojson"] = _tojson
        for name in LEFT_OUT:
            del self.filters[name]
        self.filters = {name: _charged(name, f) for name, f in self.filters.items()}
        self.filters |= {_STEP: _charge_step, _CONCATENATE: _concatenate, _SIZED: _sized}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Charging().visit(super()._parse(source, name, filename))

    def call(  # names that no argument of a macro has
        __self,  # noqa: N805
        __context: runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls an object for a template."""
        budget.charge(budget.STEP)
        if isinstance(__obj, types.BuiltinMethodType):
            args = _charge_method(__obj, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        budget.charge_size(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns what stands for `str.format` in a template."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def charged(*args: Any, **kwargs: Any) -> str:
            budget.charge_format(value.__self__, args, kwargs)
            return wrapped(*args, **kwargs)

        return charged

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Returns `left operator right`."""
        budget.charge_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _charge_method(
    method: types.BuiltinMethodType, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Charges the method of a value; returns its arguments, generators as lists."""
    if not isinstance(method.__self__, str | bytes | int):
        return args
    estimate = budget.METHODS.get(method.__name__)
    if estimate is not None:
        args = tuple(_finite(value) for value in args)
        estimate(method.__self__, *args, **kwargs)
    return args


def _finite(value: Any) -> Any:
    """Returns a list in place of a generator, so that its size is known."""
    return value if isinstance(value, Sized) or not hasattr(value, "__next__") else list(value)


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that charges what it costs; it is called as `function` is."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or what stands for it

    @functools.wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        if name == "join":
            args = (*args[:skip], _finite(args[skip]), *args[skip + 1 :])
        budget.charge_filter(name, *args[skip:], **kwargs)
        result = function(*args, **kwargs)
        budget.charge_size(result)
        return result

    return charged


@jinja2.pass_context
def _finalize(_: runtime.Context, value: Any) -> Any:
    """Charges what a template writes; for the context's sake nothing is folded when compiled."""
    budget.charge_text(value)
    return value


def _charge_step(units: int) -> str:
    budget.charge(units)
    return ""


@jinja2.pass_eval_context
def _concatenate(eval_context: nodes.EvalContext, values: list[Any]) -> str:
    budget.charge_text(values)
    join = runtime.markup_join if eval_context.autoescape else runtime.str_join
    return join(values)


def _sized(value: Any) -> Any:
    budget.charge_size(value)
    return value


# Hugging Face's own names


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON without jinja2's escapes for HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    budget.charge_percent(pattern, None)
    return datetime.datetime.now().strftime(pattern)


class _Dict:
    """`dict` without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(utils.Namespace):
    """`namespace` whose names may not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N805 (`self` is a name, too)
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace of a chat template takes no name with an underscore first: {name[:80]!r}"
        )
