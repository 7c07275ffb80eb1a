"""Field names: translates field names in errors, for protocols whose requests the server translates to chats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ...engine.errors import RequestError
from ..errors import faults_of
from ..structured.output_format import OutputFormat


class FieldNames:
    """Translates the names of chat fields to the names of another protocol, so that errors name the fields that were
    sent.

    Args:
        patterns: pairs of a regular expression for a chat field's path and its replacement, applied in this order.
        parts: names in the other protocol for parts of the paths in pydantic's errors; None leaves a part out.
    """

    def __init__(self, *patterns: tuple[str, str], parts: Mapping[str, str | None]) -> None:
        self._patterns = [(re.compile(pattern), name) for pattern, name in patterns]
        self._parts = parts

    def translated(self, text: str) -> str:
        """Return the text with the chat's field names replaced by those of the other protocol."""
        for pattern, name in self._patterns:
            text = pattern.sub(name, text)
        return text

    def of_format(self, output_format: OutputFormat | None) -> OutputFormat | None:
        """Return the output format with the other protocol's field names, for its errors."""
        if output_format is None:
            return None
        plan = output_format.tools
        if plan is not None:
            fields = tuple((root, self.translated(field)) for root, field in plan.schema_fields)
            plan = replace(plan, schema_fields=fields)
        return replace(output_format, field=self.translated(output_format.field), tools=plan)

    @contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Context manager: a ``RequestError`` on a chat field raised in the block names the other protocol's field."""
        try:
            yield
        except RequestError as error:
            if error.param is None or (param := self.translated(error.param)) == error.param:
                raise
            raise RequestError(str(error).replace(error.param, param), param=param, code=error.code) from None

    @contextmanager
    def naming_invalid(self) -> Iterator[None]:
        """Context manager: convert pydantic's errors on a chat to ``RequestValidationError`` with the other names."""
        try:
            yield
        except ValidationError as error:
            raise RequestValidationError([self._translated_error(each) for each in faults_of(error)]) from None

    def _translated_error(self, error: dict[str, Any]) -> dict[str, Any]:
        context = dict(error.get("ctx", {}))
        location = [self._parts.get(str(part), part) for part in (*error["loc"], *context.pop("field", ()))]
        return {**error, "loc": ("body", *(part for part in location if part is not None)), "ctx": context}
