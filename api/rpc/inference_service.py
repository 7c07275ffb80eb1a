"""``inference.GRPCInferenceService``: the Open Inference Protocol over gRPC, through the handlers of ``/v2``."""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

import grpc
from pydantic import ValidationError

from ..errors import reply_to_fields
from ..large_bodies import beside_loop
from ..protocol.infer_tensors import InferRequest
from .app_calls import AppCalls, CallError, finite
from .messages import message

NAME = "inference.GRPCInferenceService"
_CONTENTS = {
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_FINAL = "triton_final_response"


def _refused(text: str) -> CallError:
    return CallError(grpc.StatusCode.INVALID_ARGUMENT, text)


class InferenceService:
    """The methods of the service. Their arguments are parsed messages.

    Args:
        calls: sends calls to the server's routes.
    """

    def __init__(self, calls: AppCalls) -> None:
        self._calls = calls

    @property
    def unary(self) -> Mapping[str, Callable[[Any, Any], Any]]:
        """The methods that return one answer, by name."""
        return {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }

    async def _server_live(self, _request: Any, context: Any) -> Any:
        live = await self._calls.status(context, "/health/live") == 200
        return message("inference.ServerLiveResponse")(live=live)

    async def _server_ready(self, _request: Any, context: Any) -> Any:
        ready = await self._calls.status(context, "/health/ready") == 200
        return message("inference.ServerReadyResponse")(ready=ready)

    async def _model_ready(self, request: Any, context: Any) -> Any:
        async with self._calls.open(context, "GET", f"{_path(request.name)}/ready") as answer:
            if answer.status not in (200, 503):
                await answer.body()
            return message("inference.ModelReadyResponse")(ready=answer.status == 200)

    async def _server_metadata(self, _request: Any, context: Any) -> Any:
        return message("inference.ServerMetadataResponse")(**await self._calls.json(context, "GET", "/v2"))

    async def _model_metadata(self, request: Any, context: Any) -> Any:
        told = await self._calls.json(context, "GET", _path(request.name))
        return message("inference.ModelMetadataResponse")(**told)

    async def _infer(self, request: Any, context: Any) -> Any:
        body, asked = await beside_loop(partial(_checked, request))
        if asked.wants_stream:
            raise _refused("'stream' must be false here: ModelStreamInfer streams.")
        told = await self._calls.json(context, "POST", f"{_path(request.model_name)}/infer", body)
        return _response(told, is_raw=bool(request.raw_input_contents))

    async def stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncGenerator[Any, None]:
        """Yield the answers to the requests, one request after the other. An error is also sent as an answer."""
        kind = message("inference.ModelStreamInferResponse")
        async for request in requests:
            try:
                async for response in self._answers(request, context):
                    yield kind(infer_response=response)
            except CallError as error:
                yield kind(error_message=error.message, infer_response={"id": request.id})

    async def _answers(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        _, asked = await beside_loop(partial(_checked, request))
        if not asked.wants_stream:
            yield _final(await self._infer(request, context))
            return
        if len(asked.texts) != 1:
            raise _refused("'text_input' must be one text if 'stream' is true.")
        fields = asked.completion_fields(request.model_name) | {"stream": True}
        name = request.model_name
        reason = ""
        async for event in self._calls.events(context, "/v1/completions", fields):
            for choice in event["choices"]:
                name, reason = event["model"], choice.get("finish_reason") or ""
                told = {"text_output": [choice["text"]], "finish_reason": [reason]}
                if choice["text"] or reason:
                    response = _response(_outputs(asked, name, told), is_raw=bool(request.raw_input_contents))
                    yield _final(response) if reason else response

    async def _index(self, request: Any, context: Any) -> Any:
        found = await self._calls.json(context, "POST", "/v2/repository/index", {"ready": request.ready})
        return message("inference.RepositoryIndexResponse")(models=found)

    async def _load(self, request: Any, context: Any) -> Any:
        parameters = {name: _parameter(name, value) for name, value in request.parameters.items()}
        path = f"/v2/repository/models/{_name(request.model_name)}/load"
        await self._calls.json(context, "POST", path, {"parameters": parameters})
        return message("inference.RepositoryModelLoadResponse")()

    async def _unload(self, request: Any, context: Any) -> Any:
        await self._calls.json(context, "POST", f"/v2/repository/models/{_name(request.model_name)}/unload", {})
        return message("inference.RepositoryModelUnloadResponse")()


def infer_body(request: Any) -> dict[str, Any]:
    """Convert a request to the body of ``POST /v2/models/{name}/infer``. Raises CallError."""
    raw = list(request.raw_input_contents)
    if raw and (len(raw) != len(request.inputs) or any(each.HasField("contents") for each in request.inputs)):
        raise _refused("'raw_input_contents' must have the values of all inputs or be empty.")
    inputs = []
    for number, tensor in enumerate(request.inputs):
        data = _raw_values(tensor, raw[number]) if raw else _values(tensor)
        inputs.append({"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape), "data": data})
    parameters = {name: _parameter(name, value) for name, value in request.parameters.items()}
    outputs = [{"name": output.name} for output in request.outputs]
    return {"id": request.id, "parameters": parameters, "inputs": inputs, "outputs": outputs}


def _checked(request: Any) -> tuple[dict[str, Any], InferRequest]:
    """Convert a request to a body, and parse it like the route. Raises CallError with pydantic's first error."""
    body = infer_body(request)
    try:
        return body, InferRequest.model_validate(body)
    except ValidationError as error:
        raise _refused(reply_to_fields(error).message) from None


def _values(tensor: Any) -> list[Any]:
    field = _CONTENTS.get(tensor.datatype)
    values = [] if field is None else list(getattr(tensor.contents, field))
    return [_text(tensor.name, each) for each in values] if tensor.datatype == "BYTES" else values


def _raw_values(tensor: Any, data: bytes) -> list[Any]:
    """Decode values in Triton's raw format: each text follows its length in 4 bytes; a boolean is one byte."""
    if tensor.datatype == "BOOL":
        return [bool(each) for each in data]
    if tensor.datatype != "BYTES":
        return []
    values, at = [], 0
    while at < len(data):
        if len(data) - at < 4:
            raise _refused(f"'{tensor.name[:128]}' must have a length of 4 bytes before each text.")
        (size,) = struct.unpack_from("<I", data, at)
        at += 4
        if size > len(data) - at:
            raise _refused(f"'{tensor.name[:128]}' has a text that is shorter than its length says.")
        values.append(_text(tensor.name, data[at : at + size]))
        at += size
    return values


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _refused(f"'{name[:128]}' must be UTF-8.") from None


def _parameter(name: str, value: Any) -> Any:
    which = value.WhichOneof("parameter_choice")
    found = None if which is None else getattr(value, which)
    return found.decode(errors="replace") if isinstance(found, bytes) else finite(name, found)


def _outputs(asked: InferRequest, model: str, told: Mapping[str, list[str]]) -> dict[str, Any]:
    wanted = [name for name in asked.wanted if name in told]
    outputs = [{"name": name, "datatype": "BYTES", "shape": [1], "data": told[name]} for name in wanted]
    return {"model_name": model, "model_version": "1", "id": asked.id, "outputs": outputs}


def _response(told: dict[str, Any], *, is_raw: bool) -> Any:
    """Return the message of an answer. Its values are raw if those of the request are raw."""
    response = message("inference.ModelInferResponse")(
        model_name=told["model_name"], model_version=told["model_version"], id=told["id"]
    )
    for output in told["outputs"]:
        made = response.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        values = [each.encode() for each in output["data"]] if output["datatype"] == "BYTES" else output["data"]
        if not is_raw:
            getattr(made.contents, _CONTENTS[output["datatype"]]).extend(values)
        elif output["datatype"] == "BYTES":
            response.raw_output_contents.append(b"".join(struct.pack("<I", len(each)) + each for each in values))
        else:
            response.raw_output_contents.append(struct.pack(f"<{len(values)}I", *values))
    return response


def _final(response: Any) -> Any:
    response.parameters[_FINAL].bool_param = True
    return response


def _name(name: str) -> str:
    if not name:
        raise _refused("A model must be named.")
    return quote(name, safe="")


def _path(name: str) -> str:
    return f"/v2/models/{_name(name)}"
