"""Jinja environment of chat templates: a sandbox that counts the work of a template and does not fold constants.

A template is a program by the publisher of a model or an adapter, who is not trusted. Each loop, call, operator and
output of a template is charged to a budget before it runs. An operation whose cost is not known in advance raises
``TemplateDeferred``; the template must then be rendered in a process that can be killed. So a render within the budget
takes milliseconds, whatever the template does.
"""

from __future__ import annotations

import datetime
import functools
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

from jinja2 import TemplateError, Undefined, nodes
from jinja2.compiler import CodeGenerator
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

UNITS = 400_000
"""Budget of work in the calling thread.

One unit is the work on about one character; the whole budget takes some milliseconds.
"""
_CALL = 20
_ITERATION = 10
_VISIT = 5  # Cost of each value in a list or an object, in units.
_MOST_BITS = 4096  # Largest number of bits of an integer result.
_MOST_INDENT = 16

_STR_METHODS = frozenset(
    {
        *("capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower", "isspace"),
        *("isupper", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "rfind", "rpartition", "rsplit"),
        *("rstrip", "split", "splitlines", "startswith", "strip", "title", "upper"),
    }
)
_DICT_METHODS = frozenset(("copy", "get", "items", "keys", "values"))
_LIST_METHODS = frozenset(("append", "pop"))
"""Methods by which templates use a list as a queue, although the sandbox of transformers refuses them (Kimi K2's)."""
_PLAIN_FILTERS = ("capitalize", "first", "items", "last", "list", "lower", "reverse", "title", "trim", "upper")
_FREE_FILTERS = ("abs", "count", "d", "default", "float", "int", "length", "safe")
_PICKING_FILTERS = ("map", "reject", "rejectattr", "select", "selectattr")


class TemplateDeferred(Exception):
    """Raised if a render needs more work than the budget, or an operation whose work is not known in advance."""


class _Budget(threading.local):
    """The remaining budget of the render in this thread, in units. It is infinite outside of ``counted_work``."""

    left = float("inf")
    is_limited = False


_budget = _Budget()


@contextmanager
def counted_work() -> Iterator[None]:
    """Context manager: the renders of this thread share one budget of work. Beyond it they raise TemplateDeferred."""
    before = _budget.left, _budget.is_limited
    _budget.left, _budget.is_limited = UNITS, True
    try:
        yield
    finally:
        _budget.left, _budget.is_limited = before


def _charge(units: float) -> None:
    left = _budget.left - units
    _budget.left = left
    if left < 0:
        raise TemplateDeferred


def _defer() -> None:
    """Raise TemplateDeferred for an operation of unknown cost, if the work is counted."""
    if _budget.is_limited:
        raise TemplateDeferred


def _weigh(value: Any) -> None:
    """Charge the budget for visiting all parts of a value. A part that occurs several times is charged each time."""
    if isinstance(value, str):
        _charge(_VISIT + len(value))
    elif isinstance(value, dict):
        _charge(_VISIT)
        for key, each in value.items():
            _weigh(key)
            _weigh(each)
    elif isinstance(value, list | tuple):
        _charge(_VISIT)
        for each in value:
            _weigh(each)
    elif value is None or isinstance(value, bool | int | float | Undefined):
        _charge(_VISIT)
    else:
        _defer()


def _written(value: Any) -> Any:
    """Charge the budget for a value that is output or compared. Returns the value."""
    if type(value) is str:
        _charge(_VISIT + len(value))
    elif _budget.is_limited:
        _weigh(value)
    return value


def _iterated(value: Any, size: int) -> Any:
    """Charge the budget for all iterations of a loop over a value. Returns the value.

    Args:
        size: number of characters of plain text in the body of the loop.
    """
    try:
        count = len(value)
    except TypeError:
        return _each(value, size) if isinstance(value, Iterable) and not isinstance(value, Undefined) else value
    _charge(count * (_ITERATION + size))
    return value


def _each(values: Iterable[Any], size: int) -> Iterator[Any]:
    for value in values:
        _charge(_ITERATION + size)
        yield value


class _CountedCode(CodeGenerator):
    """Jinja code generator that computes no constant expressions, because that work would not be counted.

    It counts tuples.
    """

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:
        """Generate code that charges for a tuple, because hashing a tuple hashes all its parts."""
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.finalize(")
        super().visit_Tuple(node, frame)
        self.write(")")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja environment as in transformers: with ``raise_exception``, ``strftime_now`` and a plain ``tojson``.

    Attributes:
        may_change_lists: whether templates may append to lists and take items out. They may then change each list that
            they are given.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%", "//"))
    code_generator_class = _CountedCode

    def __init__(self) -> None:
        self.may_change_lists = False
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=_written,
            extensions=[_Generation, loopcontrols],
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _deferred(function) for name, function in self.filters.items()} | _counted(self.filters)
        self.filters |= {"_written": _written, "_iterated": _iterated}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self._functions = (self.globals["range"], self.globals["dict"], Namespace, _raise_exception, _strftime_now)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template. Adds charges for loops, for operands of ``~`` and for comparisons to the syntax tree."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            size = sum(len(data.data) for each in loop.body for data in _texts(each))
            loop.iter = self._filter(
                "_iterated", cast(nodes.Expr, loop.iter), nodes.Const(size, lineno=loop.lineno, environment=self)
            )
        for joined in list(tree.find_all(nodes.Concat)):
            joined.nodes = [self._filter("_written", each) for each in joined.nodes]
        for compare in list(tree.find_all(nodes.Compare)):
            sides = [compare.expr, *(operand.expr for operand in compare.ops)]
            if not any(map(_is_constant, sides)):
                compare.expr = self._filter("_written", compare.expr)
                for operand in compare.ops:
                    operand.expr = self._filter("_written", operand.expr)
        return tree

    def _filter(self, name: str, value: nodes.Expr, *arguments: nodes.Expr) -> nodes.Filter:
        return nodes.Filter(value, name, list(arguments), [], None, None, lineno=value.lineno, environment=self)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charge for a binary operator whose result may be large, and compute it."""
        if operator == "+":
            _charge(len(left) + len(right) if type(left) is type(right) is str else _size(left) + _size(right))
            return left + right
        if operator in ("%", "//"):
            if not isinstance(left, int | float):
                _defer()
        elif operator == "**":
            _defer()
        elif isinstance(left, int | float) and isinstance(right, int | float):
            if _bits(left) + _bits(right) > _MOST_BITS:
                _defer()
        else:
            times = next((side for side in (left, right) if isinstance(side, int)), 1)
            _charge(max(0, times) * (_size(left) + _size(right)))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Charge for a call of a macro, a function or a method, and perform the call."""
        _charge(_CALL)
        if _budget.is_limited:
            __self._charge_call(__obj, args)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(__obj, Macro):
            _charge(len(result))
        return result

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use an attribute: as in Jinja's sandbox, or to change a list."""
        changes = self.may_change_lists and type(obj) is list and attr in _LIST_METHODS
        return changes or super().is_safe_attribute(obj, attr, value)

    def _charge_call(self, function: Any, arguments: tuple[Any, ...]) -> None:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str):
            if name == "replace" and len(arguments) == 2:
                _charge_replace(owner, *arguments)
            elif name == "join" and len(arguments) == 1:
                _charge_join(arguments[0], owner)
            elif name in _STR_METHODS:
                _charge(len(owner) + sum(map(_size, arguments)))
            else:
                _defer()
        elif isinstance(owner, dict | list) and name in (_DICT_METHODS if isinstance(owner, dict) else _LIST_METHODS):
            _charge(len(owner))
        elif isinstance(owner, LoopContext) and name == "cycle":
            _charge(1)
        elif function is _strftime_now:
            if any(_size(form) > 64 for form in arguments):
                _defer()
        elif not isinstance(function, Macro) and not any(function is each for each in self._functions):
            _defer()


def changes_lists(template: nodes.Template) -> bool:
    """Return whether a template uses a list as a queue, so that it must be given copies of all lists."""
    return any(each.attr in _LIST_METHODS for each in template.find_all(nodes.Getattr))


def _is_constant(node: nodes.Expr) -> bool:
    """Return whether an expression is a constant or a list of constants, so that a comparison with it costs little."""
    items = node.items if isinstance(node, nodes.List | nodes.Tuple) else [node]
    return all(isinstance(each, nodes.Const) for each in items)


def _texts(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict) else 1


def _bits(value: float) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _charge_replace(text: str, old: Any, new: Any, *_count: Any) -> None:
    _charge(len(text) + (text.count(old) * _size(new) if isinstance(old, str) else 0))


def _charge_join(values: Any, separator: Any = "", *_attribute: Any) -> None:
    if not isinstance(values, str | list | tuple | dict):
        _defer()
        return
    _weigh(values)
    _charge(len(values) * _size(separator))


def _charge_json(value: Any, *arguments: Any, **named: Any) -> None:
    indent = named.get("indent", arguments[1] if len(arguments) > 1 else None)
    if not isinstance(indent, int | None) or (indent or 0) > _MOST_INDENT:
        _defer()
    for _ in range(2 + (indent or 0)):
        _weigh(value)


def _charge_picking(value: Any, *arguments: Any, **named: Any) -> None:
    """Charge for a filter that visits each element. Its arguments name attributes, filters and tests."""
    if not all(isinstance(each, str | int | None) for each in (*arguments, *named.values())):
        _defer()
    _charge(_size(value) * _ITERATION)


def _deferred(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def filtered(*arguments: Any, **named: Any) -> Any:
        _defer()
        return function(*arguments, **named)

    return filtered


def _counted(filters: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the filters of known cost, each wrapped so that it charges the budget."""
    charges: dict[str, Callable[..., None]] = {
        **dict.fromkeys(_FREE_FILTERS, lambda *_, **__: _charge(1)),
        **dict.fromkeys(_PLAIN_FILTERS, lambda value=None, *_, **__: _charge(_size(value))),
        **dict.fromkeys(_PICKING_FILTERS, _charge_picking),
        "string": lambda value, *_: _weigh(value),
        "join": lambda value, d="", attribute=None: _charge_join(value, d),
        "replace": lambda s, old, new, count=None: _charge_replace(str(s), old, new),
        "tojson": _charge_json,
    }
    return {name: _charging(filters[name], charge) for name, charge in charges.items()}


def _charging(function: Callable[..., Any], charge: Callable[..., None]) -> Callable[..., Any]:
    # Jinja passes the environment or the context to some filters as an argument before the value.
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def filtered(*arguments: Any, **named: Any) -> Any:
        if _budget.is_limited:
            charge(*arguments[skipped:], **named)
        return function(*arguments, **named)

    return filtered


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: Any) -> list[Any]:
    """Return the result of a filter such as ``map`` as a list, because other template engines serialize it as one."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training. Its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Parse the tag. Its body gets a scope of its own, as in transformers."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)
