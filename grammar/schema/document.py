"""Schema document: its subschemas as numbered nodes, and the resolution of references, anchors and ``$id``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from ..annotations import SUBSCHEMA, SUBSCHEMAS
from ..errors import GrammarError
from .keywords import of_draft

_CONTAINERS = (dict, list)
# References may lead out of a schema to the standard's meta-schemas, whose addresses have these prefixes.
_STANDARD_HOSTS = ("http://json-schema.org/", "https://json-schema.org/")
# Name for ``"$recursiveAnchor": true`` among the names of dynamic anchors.
RECURSIVE = ""
# Keywords whose subschemas may have to fail: `maxContains` counts the items for which `contains` holds.
_NEGATING = ("oneOf", "not", "if", "contains")
# Drafts whose keywords differ too much from those of the other drafts.
_UNSUPPORTED = ("draft-00", "draft-01", "draft-02", "draft-03", "draft/next")
_DRAFTS = {
    "draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019, "2020-12": 2020,
}  # fmt: skip


class SchemaScope(NamedTuple):
    """The base URI of a subschema's references, and the draft of its keywords.

    Attributes:
        base: the base URI of references.
        resource: the schema object to which the reference ``#`` leads.
        draft: 4, 6, 7, 2019 or 2020: from ``$schema`` of the resource if it has one, else from the enclosing resource.
    """

    base: str
    resource: dict[str, Any]
    draft: int

    def enter(self, schema: dict[str, Any], pointer: str) -> SchemaScope:
        """Return the scope of a subschema at a pointer: a scope of its own if it has an id.

        Raises:
            GrammarError: the subschema names a draft that is not supported.
        """
        draft = _draft(schema, pointer, self.draft) if "$schema" in schema else self.draft
        own = schema.get("id" if draft <= 4 else "$id")
        if not isinstance(own, str) or own.startswith("#") or not own or (draft <= 7 and "$ref" in schema):
            return self
        return SchemaScope(urldefrag(urljoin(self.base, own))[0], schema, draft)


@dataclass(frozen=True, slots=True, eq=False)
class SchemaNode:
    """One subschema.

    Attributes:
        schema: the object (booleans are never nodes), without the keywords that its draft ignores.
        pointer: JSON Pointer from the root of the document.
        scope: the subschema's own scope if it has an id, else the scope of the enclosing resource.
    """

    schema: dict[str, Any]
    pointer: str
    scope: SchemaScope

    def error(self, keyword: str, reason: str) -> GrammarError:
        return GrammarError(keyword, pointer_join(self.pointer, keyword), reason)


class _Identifiers(NamedTuple):
    """Resources by URI (scope, pointer), anchors by resource and name (schema, pointer, scope), dynamic anchors."""

    resources: dict[str, tuple[SchemaScope, str]]
    anchors: dict[tuple[int, str], tuple[dict[str, Any], str, SchemaScope]]
    dynamic: Counter[str]

    def add_anchors(self, schema: dict[str, Any], pointer: str, scope: SchemaScope) -> None:
        """Add the anchors that a subschema declares."""
        names = [schema.get("$anchor"), schema.get("$dynamicAnchor")]
        legacy = schema.get("id" if scope.draft <= 4 else "$id")
        if isinstance(legacy, str) and legacy.startswith("#"):
            names.append(legacy[1:])
        for name in names:
            if isinstance(name, str):
                self.anchors.setdefault((id(scope.resource), name), (schema, pointer, scope))


def pointer_join(pointer: str, *tokens: str | int) -> str:
    """Return a JSON Pointer extended by escaped tokens."""
    for token in tokens:
        text = str(token)
        if "~" in text or "/" in text:
            text = text.replace("~", "~0").replace("/", "~1")
        pointer = f"{pointer}/{text}"
    return pointer


class Document:
    """The nodes of one schema; a subschema object has the same number on every path to it.

    Attributes:
        nodes: the nodes visited so far, by number.
        root: the number of the whole schema.
        tracks_evaluation: whether the schema uses ``unevaluatedProperties`` or ``unevaluatedItems``.
        most_any_of: largest number of branches of an ``anyOf``.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.nodes: list[SchemaNode] = []
        self._ids: dict[int, int] = {}
        self._keep: list[dict[str, Any]] = []
        keys, self.most_any_of = _keys(root)
        self.tracks_evaluation = not keys.isdisjoint(("unevaluatedProperties", "unevaluatedItems"))
        self._negates = not keys.isdisjoint(_NEGATING)
        self._refers = not keys.isdisjoint(("$ref", "$dynamicRef", "$recursiveRef"))
        self.root = self._add(root, "", SchemaScope("", root, _draft(root, "", 2020)).enter(root, ""))

    def may_negate(self, node: SchemaNode) -> bool:
        """Return whether a node's negation may matter: it is in one of `_NEGATING`, or may be referred to."""
        return self._may_negate(node.pointer)

    def _may_negate(self, pointer: str) -> bool:
        return self._negates and (self._refers or not set(_NEGATING).isdisjoint(pointer.split("/")))

    def child(self, parent: int, schema: dict[str, Any], *tokens: str | int) -> int:
        """Return the node of a subschema.

        Args:
            parent: number of the node that contains it.
            tokens: the JSON Pointer tokens from the parent to the subschema.
        """
        known = self._ids.get(id(schema))
        if known is not None:
            return known
        node = self.nodes[parent]
        pointer = pointer_join(node.pointer, *tokens)
        return self._add(schema, pointer, node.scope.enter(schema, pointer))

    def synthetic(self, schema: dict[str, Any], like: int) -> int:
        """Return a node for a synthetic schema, located at an existing node.

        Its keywords are those of 2020-12 in a document of any draft: a draft must not ignore them.
        """
        self._keep.append(schema)
        node = self.nodes[like]
        return self._add(schema, node.pointer, node.scope._replace(draft=2020))

    def resolve(self, number: int, reference: str, keyword: str = "$ref") -> int | bool:
        """Return the node that a reference leads to, or a boolean schema.

        Raises:
            GrammarError: the target of the reference does not exist, or is outside of the document.
        """
        node = self.nodes[number]
        where = pointer_join(node.pointer, keyword)
        uri, fragment = urldefrag(reference)
        if not uri:
            scope = node.scope
            resources = self._identifiers.resources.values()
            pointer = next((pointer for each, pointer in resources if each.resource is scope.resource), "")
        else:
            found = self._resource(urldefrag(urljoin(node.scope.base, uri))[0], where)
            if found is None:
                raise GrammarError(keyword, where, f"{reference[:200]!r} is outside of the schema and is never fetched")
            scope, pointer = found
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._at_anchor(scope, fragment, keyword, where, reference)
        return self._at_pointer(scope, pointer, fragment, keyword, where)

    def dynamic_target(self, number: int, reference: str, keyword: str) -> int | bool:
        """Return the node that a dynamic reference leads to on every path of evaluation, or a boolean schema.

        Raises:
            GrammarError: the target of the reference does not exist, or depends on the path of evaluation.
        """
        node = self.nodes[number]
        target = self.resolve(number, reference, keyword)
        name = RECURSIVE if keyword == "$recursiveRef" else urldefrag(reference)[1]
        if isinstance(target, bool) or not _declares(self.nodes[target].schema, name):
            return target
        # The outermost anchor of a meta-schema belongs to the part to which the schema refers.
        entries = self._standard_entries if standard_schema(node.scope.base) is not None else ()
        declared = self._identifiers.dynamic[name]
        if declared + len(entries) > 1:
            anchor = "recursive anchor" if name == RECURSIVE else f"dynamic anchor {name[:100]!r}"
            raise node.error(keyword, f"there is more than one {anchor}: the target depends on the path")
        for uri in entries:
            found = self._resource(uri, node.pointer)
            assert found is not None
            target = self._at_pointer(*found, "", keyword, node.pointer)
        return target

    def _resource(self, uri: str, where: str) -> tuple[SchemaScope, str] | None:
        """Return scope and pointer of a resource of the document or of the standard, which is at its reference."""
        identifiers = self._identifiers
        if uri not in identifiers.resources and (schema := standard_schema(uri)) is not None:
            scope = SchemaScope(uri, schema, _draft(schema, where, 2020))
            identifiers.resources[uri] = scope, where
            for each, pointer, inner in _walk_schemas(schema, where, scope):
                identifiers.add_anchors(each, pointer, inner)
        return identifiers.resources.get(uri)

    @cached_property
    def _standard_entries(self) -> tuple[str, ...]:
        """The meta-schemas, and parts of them, to which the document itself refers."""
        found: dict[str, None] = {}
        stack: list[Any] = [self.nodes[self.root].schema]
        while stack:
            at = stack.pop()
            if isinstance(at, dict):
                if isinstance(reference := at.get("$ref"), str):
                    found[urldefrag(reference)[0]] = None
                at = at.values()
            stack += [value for value in at if isinstance(value, _CONTAINERS)]
        return tuple(uri for uri in found if standard_schema(uri) is not None)

    def _add(self, schema: dict[str, Any], pointer: str, scope: SchemaScope) -> int:
        self._ids[id(schema)] = len(self.nodes)
        kept = of_draft(
            schema, scope.draft, negates=self._may_negate(pointer), tracks_evaluation=self.tracks_evaluation
        )
        self.nodes.append(SchemaNode(kept, pointer, scope))
        return len(self.nodes) - 1

    @cached_property
    def _identifiers(self) -> _Identifiers:
        root, found = self.nodes[self.root], _Identifiers({}, {}, Counter())
        for schema, pointer, scope in _walk_schemas(root.schema, "", root.scope):
            if scope.resource is schema:
                found.resources.setdefault(scope.base, (scope, pointer))
            found.add_anchors(schema, pointer, scope)
            if isinstance(name := schema.get("$dynamicAnchor"), str):
                found.dynamic[name] += 1
            found.dynamic[RECURSIVE] += schema.get("$recursiveAnchor") is True
        found.resources.setdefault("", (root.scope, ""))
        return found

    def _at_anchor(self, scope: SchemaScope, name: str, keyword: str, where: str, reference: str) -> int:
        found = self._identifiers.anchors.get((id(scope.resource), name))
        if found is None:
            raise GrammarError(keyword, where, f"{reference[:200]!r} does not exist: there is no anchor {name[:100]!r}")
        schema, pointer, scope = found
        known = self._ids.get(id(schema))
        return known if known is not None else self._add(schema, pointer, scope)

    def _at_pointer(self, scope: SchemaScope, pointer: str, fragment: str, keyword: str, where: str) -> int | bool:
        at: Any = scope.resource
        for token in fragment.split("/")[1:]:
            token = token.replace("~1", "/").replace("~0", "~")
            if isinstance(at, dict) and token in at:
                at = at[token]
            elif isinstance(at, list) and token.isdecimal() and int(token) < len(at):
                at = at[int(token)]
            else:
                raise GrammarError(keyword, where, f"'#{fragment[:200]}' does not exist: there is no {token[:100]!r}")
            pointer = pointer_join(pointer, token)
            if isinstance(at, dict):
                scope = scope.enter(at, pointer)
        if isinstance(at, bool):
            return at
        if not isinstance(at, dict):
            raise GrammarError(keyword, where, f"'#{fragment[:200]}' refers to {type(at).__name__}, not to a schema")
        known = self._ids.get(id(at))
        return known if known is not None else self._add(at, pointer, scope)


def _keys(root: dict[str, Any]) -> tuple[set[str], int]:
    """Return the keys of all objects in a schema, and the largest number of branches of an ``anyOf``."""
    found: set[str] = set()
    most = 0
    stack: list[Any] = [root]
    while stack:
        at = stack.pop()
        if isinstance(at, dict):
            found.update(at)
            if isinstance(branches := at.get("anyOf"), list):
                most = max(most, len(branches))
            at = at.values()
        stack += [value for value in at if isinstance(value, _CONTAINERS)]
    return found, most


def _draft(schema: dict[str, Any], pointer: str, default: int) -> int:
    """Return the draft that ``$schema`` of a schema at a pointer names, or the default."""
    named = schema.get("$schema")
    if isinstance(named, str):
        if any(part in named for part in _UNSUPPORTED):
            where = pointer_join(pointer, "$schema")
            raise GrammarError("$schema", where, f"{named[:100]!r} is not supported; drafts 4 to 2020-12 are")
        for part, number in _DRAFTS.items():
            if part in named:
                return number
    return default


def _declares(schema: dict[str, Any], name: str) -> bool:
    """Return whether a schema declares a dynamic anchor, or with `RECURSIVE` is a recursive one."""
    return schema.get("$recursiveAnchor") is True if name == RECURSIVE else schema.get("$dynamicAnchor") == name


def _walk_schemas(
    root: dict[str, Any], pointer: str, scope: SchemaScope
) -> Iterator[tuple[dict[str, Any], str, SchemaScope]]:
    """Yield every subschema with its pointer and scope; values of unknown keywords are not subschemas."""
    stack: list[tuple[dict[str, Any], str, SchemaScope]] = [(root, pointer, scope)]
    while stack:
        at, pointer, scope = stack.pop()
        yield at, pointer, scope
        for step, schema in _subschemas(at):
            where = pointer_join(pointer, *step)
            stack.append((schema, where, scope.enter(schema, where)))


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """Yield the direct subschemas of a schema, each with the tokens that lead to it."""
    for keyword, value in schema.items():
        if keyword in SUBSCHEMA and isinstance(value, dict):
            yield (keyword,), value
        elif keyword in SUBSCHEMA and isinstance(value, list):
            yield from (((keyword, index), item) for index, item in enumerate(value) if isinstance(item, dict))
        elif keyword in SUBSCHEMAS and isinstance(value, dict):
            yield from (((keyword, name), item) for name, item in value.items() if isinstance(item, dict))


def standard_schema(uri: str) -> dict[str, Any] | None:
    """Return the meta-schema, or vocabulary of one, of a URI without fragment; None for any other URI."""
    return _standard_schemas().get(uri) if uri.startswith(_STANDARD_HOSTS) else None


@cache
def _standard_schemas() -> dict[str, dict[str, Any]]:
    # The import is delayed because it reads twenty files, and few schemas refer to a meta-schema.
    from jsonschema_specifications import REGISTRY

    return {uri: REGISTRY.contents(uri) for uri in REGISTRY}
