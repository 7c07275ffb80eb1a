"""Read how a checkpoint's matrices are quantised: ``quantization_config`` and the files that older tools write instead.

Which modules are quantised follows from their tensors; the config defines how the numbers are read: bits, groups, zero
points. Methods are named as in transformers' ``quant_method``. A setting that would change a number and is not read
here is refused by name. If a config requests activations in floats or in 4 bits, they are not rounded: products use the
dequantised weight and unrounded activations, which is closer to the model before its quantisation. If it requests
activations in integers of 8 bits, they are rounded if that is faster. Each row is rounded by itself and outliers are
kept, which is closer to the original model than the config's scales.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import re2

from ..errors import ModelError, quoted, shortened
from .config_fields import Fields

Layout = Literal[
    "gptq", "gptq_v2", "awq_gemm", "awq_gemv", "packed", "int8", "float8", "float8_blocks", "nvfp4", "nvfp4_modelopt",
    "mxfp4", "mxfp4_packed", "mxfp8", "bnb_4bit", "bnb_int8",
]  # fmt: skip
"""How the tensors of a quantised matrix are laid out; ``engine.loading.quantised_tensors`` has the formula of each."""

KEY: Final = "quantization_config"
_WHERE: Final = f"config.json: {KEY}"
_GPTQ_FILE: Final = "quantize_config.json"  # File of AutoGPTQ from before transformers read its keys from config.json.
_MODELOPT_FILE: Final = "hf_quant_config.json"
_QUANTO_FILE: Final = "quanto_qmap.json"
FILES: Final = (_GPTQ_FILE, _MODELOPT_FILE, _QUANTO_FILE)
"""Files beside ``config.json`` that say how weights are quantised."""

KvScaleForm = Literal["int8", "fp8"]
"""Numbers that a checkpoint's static scales of keys and values are made for."""

_REGEX: Final = "re:"
_MOST_PATTERNS: Final = 10_000
_GROUPS: Final = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the stored numbers of a matrix are read.

    Attributes:
        bits: number of bits of an integer.
        group: number of inputs that share a scale; None if the shape of the scales shows it: rows, blocks, or all.
        symmetric: whether there are no zero points, or they have no effect.
        has_zeros: whether a symmetric scheme stores zero points, which must be 0.
        rounds_inputs: whether the model was made for activations in integers of 8 bits.
    """

    layout: Layout
    bits: int = 8
    group: int | None = None
    symmetric: bool = True
    rounds_inputs: bool = False
    has_zeros: bool = False


@dataclass(frozen=True, slots=True)
class _Rule:
    """A scheme and the modules to which it applies: names, patterns after ``re:``, or ``Linear`` for all."""

    targets: tuple[str, ...]
    scheme: Scheme


@dataclass(frozen=True, slots=True)
class Quantization:
    """The schemes of a checkpoint's modules.

    Attributes:
        method: name of the method, as in the config.
        rules: schemes with their modules. The most specific target decides, as in compressed-tensors: a name, then a
            pattern, then a class.
        kv_form: number format for which the scales of keys and values, if the checkpoint has them, were made; None for
            numbers or scales that are not used here.
    """

    method: str
    rules: tuple[_Rule, ...]
    kv_form: KvScaleForm | None = "fp8"

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a module whose tensors are quantised, None where no target matches its name."""
        for matches in (_is_named, _is_matched, _is_linear):
            for rule in self.rules:
                if any(matches(target, module) for target in rule.targets):
                    return rule.scheme
        return None


def _is_named(target: str, module: str) -> bool:
    return target == module


def _is_matched(target: str, module: str) -> bool:
    return target.startswith(_REGEX) and _compiled(target.removeprefix(_REGEX)).match(module) is not None


@cache
def _compiled(pattern: str) -> Any:
    """Compile a pattern whose matching takes linear time, as the file may come from anybody. Raises ``re2.error``."""
    options = re2.Options()
    options.log_errors = False
    return re2.compile(pattern, options)


def _is_linear(target: str, module: str) -> bool:
    return target == "Linear"


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return how the weights of a ``config.json`` are quantised, None for plain ones.

    Raises:
        ModelError: a method, a scheme or a value is not supported.
    """
    found = config.get(KEY) or config.get("compression_config")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ModelError(f"{_WHERE} must be an object, not {quoted(found)}.")
    fields = Fields(found, _WHERE)
    method = found.get("quant_method")
    if method is None and "config_groups" in found:
        # ModelOpt's own key for the scheme distinguishes its files from compressed-tensors' files; it may lack targets.
        method = "modelopt" if "quant_algo" in found else "compressed-tensors"
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise ModelError(f"{_WHERE}: quant_method {quoted(method)} is not supported; {', '.join(_METHODS)} are.")
    return Quantization(str(method), read(fields), _kv_form(fields))


def _kv_form(fields: Fields) -> KvScaleForm | None:
    """Return the number format in ``kv_cache_scheme`` (compressed-tensors) or ``kv_cache_quant_algo`` (ModelOpt).

    Files that have scales but neither key, as AutoFP8 wrote them, mean E4M3. Scales are not used if they have zero
    points, are computed while serving, or belong to numbers of other widths.
    """
    scheme = fields.values.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        is_static = not scheme.get("dynamic") and scheme.get("symmetric", True) is True and scheme.get("num_bits") == 8
        found = str(scheme.get("type", "int"))
        return _KV_TYPES.get(found) if is_static else None
    inner = fields.values.get("quantization")
    algorithm = (inner if isinstance(inner, dict) else fields.values).get("kv_cache_quant_algo") or "FP8"
    return _KV_ALGORITHMS.get(str(algorithm))


def with_quantization_files(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a ``config.json`` with the quantisation from files beside it, if it has none itself.

    Raises:
        ModelError: such a file is malformed.
    """
    if config.get(KEY) is not None:
        return config
    if (folder / _GPTQ_FILE).is_file():
        return config | {KEY: {"quant_method": "gptq"} | _object(folder / _GPTQ_FILE)}
    if (folder / _MODELOPT_FILE).is_file():
        inner = _object(folder / _MODELOPT_FILE).get("quantization")
        return config | {KEY: {"quant_method": "modelopt"} | (inner if isinstance(inner, dict) else {})}
    if (folder / _QUANTO_FILE).is_file():
        return config | {KEY: {"quant_method": "quanto", "modules": _object(folder / _QUANTO_FILE)}}
    return config


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not JSON.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path.name} must be a JSON object.")
    return found


def _everywhere(scheme: Scheme) -> tuple[_Rule, ...]:
    return (_Rule(("Linear",), scheme),)


def _group(fields: Fields, key: str = "group_size", default: int = -1) -> int | None:
    """Return the number of inputs of a group, None for whole rows."""
    size = fields.values.get(key, default)
    if size in (None, -1):
        return None
    if isinstance(size, bool) or size not in _GROUPS:
        raise fields.wrong(key, f"-1 or one of {', '.join(map(str, _GROUPS))}")
    return int(size)


def _only(fields: Fields, key: str, *wanted: Any) -> None:
    """Check that a value, if there is one, is a value that is computed."""
    if fields.values.get(key) is not None and fields.values[key] not in wanted:
        raise fields.wrong(key, " or ".join(map(quoted, wanted)))


def _gptq(fields: Fields) -> tuple[_Rule, ...]:
    name = fields.values.get("checkpoint_format") or fields.values.get("format") or "gptq"
    if name not in ("gptq", "gptq_v2"):
        raise fields.wrong("checkpoint_format", "gptq or gptq_v2")
    form: Layout = "gptq" if name == "gptq" else "gptq_v2"
    base = _gptq_scheme(fields, form, {})
    return (*_gptq_overrides(fields, form), *_everywhere(base))


def _gptq_scheme(fields: Fields, form: Layout, changes: Mapping[str, Any]) -> Scheme:
    fields = Fields({**fields.values, **changes}, fields.where)
    if fields.values.get("bits") not in (2, 3, 4, 8):
        raise fields.wrong("bits", "2, 3, 4 or 8")
    _only(fields, "pack_dtype", "int32")
    return Scheme(form, fields.integer("bits"), _group(fields), fields.values.get("sym", True) is True)


def _gptq_overrides(fields: Fields, form: Layout) -> tuple[_Rule, ...]:
    """Return the rules of GPTQModel's ``dynamic``: patterns of modules with other bits or groups, or unquantised."""
    found = fields.values.get("dynamic") or {}
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise fields.wrong("dynamic", "an object of objects")
    targets = {pattern: pattern.removeprefix("+:") for pattern in found if not pattern.startswith("-:")}
    for pattern in targets.values():
        _check_pattern(pattern, f"{_WHERE}: dynamic")
    schemes = {pattern: _gptq_scheme(fields, form, found[pattern]) for pattern in targets}
    return tuple(_Rule((_REGEX + targets[pattern],), scheme) for pattern, scheme in schemes.items())


def _awq(fields: Fields) -> tuple[_Rule, ...]:
    version = str(fields.values.get("version") or "gemm").lower()
    if version not in ("gemm", "gemv"):
        raise fields.wrong("version", "gemm or gemv")
    key = "w_bit" if "w_bit" in fields.values else "bits"
    if fields.values.get(key, 4) != 4:
        raise fields.wrong(key, "4")
    group = _group(fields, "q_group_size" if "q_group_size" in fields.values else "group_size", 128)
    return _everywhere(Scheme("awq_gemm" if version == "gemm" else "awq_gemv", 4, group, symmetric=False))


def _fp8(fields: Fields) -> tuple[_Rule, ...]:
    """Read FP8: in blocks, as DeepSeek V3 and transformers publish it, or with a scale per tensor, as vLLM does."""
    _only(fields, "fmt", "e4m3", "float8_e4m3fn")
    _only(fields, "activation_scheme", "dynamic", "static")
    _only(fields, "weight_block_size", [128, 128])
    return _everywhere(Scheme("float8_blocks" if fields.has("weight_block_size") else "float8"))


def _mxfp8(fields: Fields) -> tuple[_Rule, ...]:
    """Read MXFP8: E4M3 in blocks of 32 inputs, whose scales are powers of two (MiniMax M3)."""
    _only(fields, "fmt", "e4m3", "float8_e4m3fn")
    _only(fields, "scale_fmt", "ue8m0")
    _only(fields, "activation_scheme", "dynamic")
    _only(fields, "weight_block_size", [1, 32])
    _only(fields, "moe_quant_algo", "MXFP8")
    return _everywhere(Scheme("mxfp8", 8, 32))


def _fbgemm(fields: Fields) -> tuple[_Rule, ...]:
    return _everywhere(Scheme("float8"))


def _modelopt(fields: Fields) -> tuple[_Rule, ...]:
    inner = fields.values.get("quantization")
    if isinstance(inner, dict):
        fields = Fields({**fields.values, **inner}, fields.where)
    match fields.values.get("quant_algo"):
        case "FP8":
            return _everywhere(Scheme("float8"))
        case "NVFP4":
            _only(fields, "group_size", 16)
            return _everywhere(Scheme("nvfp4_modelopt", 4, 16))
    raise fields.wrong("quant_algo", "FP8 or NVFP4")


def _bitsandbytes(fields: Fields) -> tuple[_Rule, ...]:
    if fields.values.get("load_in_4bit") or fields.values.get("_load_in_4bit"):
        _only(fields, "bnb_4bit_quant_type", "nf4", "fp4")
        _only(fields, "bnb_4bit_quant_storage", "uint8", "bfloat16", "float16", "float32")
        return _everywhere(Scheme("bnb_4bit", 4))
    if fields.values.get("load_in_8bit") or fields.values.get("_load_in_8bit"):
        return _everywhere(Scheme("bnb_int8", rounds_inputs=True))
    # Of a model that was merged in 16 bits: nothing is quantised.
    return ()


def _mxfp4(fields: Fields) -> tuple[_Rule, ...]:
    return _everywhere(Scheme("mxfp4", 4, 32))


def _quanto(fields: Fields) -> tuple[_Rule, ...]:
    """Read the map from modules to types of weights that optimum-quanto writes beside its tensors."""
    modules = fields.values.get("modules")
    if not isinstance(modules, dict) or not all(isinstance(each, dict) for each in modules.values()):
        raise fields.wrong("modules", f"an object of objects, as in {_QUANTO_FILE}")
    by_type: dict[str, list[str]] = {}
    schemes = {"qint8": Scheme("int8"), "qfloat8": Scheme("float8"), "qfloat8_e4m3fn": Scheme("float8")}
    for name, values in modules.items():
        kind = values.get("weights")
        if not isinstance(kind, str) or kind not in schemes:
            raise ModelError(f"{_QUANTO_FILE}: weights {quoted(kind)} are not supported; {', '.join(schemes)} are.")
        by_type.setdefault(kind, []).append(name)
    if not by_type:
        return ()
    if len(by_type) == 1:
        return _everywhere(schemes[next(iter(by_type))])
    if len(modules) > _MOST_PATTERNS:
        raise fields.wrong("modules", f"an object of at most {_MOST_PATTERNS} modules with several types of weights")
    return tuple(_Rule(tuple(names), schemes[kind]) for kind, names in by_type.items())


def _torchao(fields: Fields) -> tuple[_Rule, ...]:
    """Read torchao's configs whose tensors hold a number in each byte: INT8, E4M3, and integers of fewer bits.

    A config for each module (``FqnToConfig``) is keyed by names, patterns that match whole names, and ``_default``.
    """
    found = fields.values.get("quant_type")
    if not isinstance(found, dict) or found.keys() != {"default"}:
        raise fields.wrong("quant_type", "an object with the key default, as transformers writes it for safetensors")
    kind, values = _torchao_config(fields, found["default"], "quant_type.default")
    if kind not in ("FqnToConfig", "ModuleFqnToConfig"):
        return _everywhere(_torchao_scheme(kind, values))
    listed = values.values.get("fqn_to_config") or values.values.get("module_fqn_to_config")
    if not isinstance(listed, dict) or len(listed) > _MOST_PATTERNS:
        raise values.wrong("fqn_to_config", f"an object of at most {_MOST_PATTERNS} configs")
    rules = []
    for name, config in listed.items():
        if config is None:
            continue  # These modules have plain weights.
        scheme = _torchao_scheme(*_torchao_config(values, config, f"fqn_to_config.{shortened(name)}"))
        if name.startswith(_REGEX):
            name = f"{_REGEX}(?:{name.removeprefix(_REGEX)})$"
            _check_pattern(name.removeprefix(_REGEX), values.where)
        rules.append(_Rule(("Linear" if name == "_default" else name.removesuffix(".weight"),), scheme))
    return tuple(rules)


def _torchao_config(fields: Fields, value: Any, name: str) -> tuple[str, Fields]:
    """Return the type of a serialised config of torchao, and its fields."""
    if not isinstance(value, dict) or not isinstance(value.get("_data"), dict):
        raise ModelError(f"{fields.where}: {name} must be an object with _type and _data, not {quoted(value)}.")
    return str(value.get("_type")), Fields(value["_data"], f"{fields.where}: {name}")


def _torchao_scheme(kind: str, values: Fields) -> Scheme:
    match kind:
        case "Int8WeightOnlyConfig":
            return Scheme("int8", 8, _group(values), has_zeros=True)
        case "Int8DynamicActivationInt8WeightConfig":
            return Scheme("int8", rounds_inputs=True, has_zeros=True)
        case "Float8WeightOnlyConfig" | "Float8DynamicActivationFloat8WeightConfig":
            dtype = values.values.get("weight_dtype")
            if dtype is not None and dtype != {"_data": "float8_e4m3fn", "_type": "torch.dtype"}:
                raise values.wrong("weight_dtype", "float8_e4m3fn")
            return Scheme("float8")
        case "IntxWeightOnlyConfig" | "Int8DynamicActivationIntxWeightConfig":
            prefix = "weight_" if kind.startswith("Int8") else ""
            packing = values.values.get("intx_packing_format")
            if not isinstance(packing, dict) or packing.get("_data") != "UNPACKED_TO_INT8":
                raise values.wrong("intx_packing_format", "UNPACKED_TO_INT8")
            mapping = values.values.get(f"{prefix}mapping_type")
            if not isinstance(mapping, dict) or mapping.get("_data") not in ("SYMMETRIC", "ASYMMETRIC"):
                raise values.wrong(f"{prefix}mapping_type", "SYMMETRIC or ASYMMETRIC")
            _, granularity = _torchao_config(values, values.values.get(f"{prefix}granularity"), f"{prefix}granularity")
            symmetric = mapping["_data"] == "SYMMETRIC"
            return Scheme("int8", 8, _group(granularity), symmetric, has_zeros=symmetric)
    raise ModelError(
        f"{values.where}: torchao's {quoted(kind)} is not supported; Int8WeightOnlyConfig, "
        "Int8DynamicActivationInt8WeightConfig, Float8WeightOnlyConfig, Float8DynamicActivationFloat8WeightConfig, "
        "IntxWeightOnlyConfig, Int8DynamicActivationIntxWeightConfig and FqnToConfig of these are."
    )


def _compressed_tensors(fields: Fields) -> tuple[_Rule, ...]:
    groups = fields.values.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(each, dict) for each in groups.values()):
        raise fields.wrong("config_groups", "an object of schemes (names of presets are not supported)")
    _only(fields, "sparsity_config", {}, {"format": "dense"})
    form = fields.values.get("format")
    return tuple(_compressed_group(name, each, form) for name, each in groups.items() if each.get("weights"))


def _compressed_group(name: str, values: dict[str, Any], form: Any) -> _Rule:
    group = Fields(values, f"{_WHERE}: config_groups.{shortened(name)}")
    targets = values.get("targets")
    if (
        not isinstance(targets, list)
        or len(targets) > _MOST_PATTERNS
        or not all(isinstance(each, str) for each in targets)
    ):
        raise group.wrong("targets", f"a list of at most {_MOST_PATTERNS} names")
    for target in targets:
        if target.startswith(_REGEX):
            _check_pattern(target.removeprefix(_REGEX), f"{group.where}.targets")
    return _Rule(tuple(targets), _compressed_scheme(group, values.get("format") or form))


def _compressed_scheme(group: Fields, form: Any) -> Scheme:
    weights = Fields(group.mapping("weights"), f"{group.where}.weights")
    bits, kind = weights.integer("num_bits", 1, 16), weights.values.get("type", "int")
    symmetric = weights.values.get("symmetric", True) is True
    _only(weights, "strategy", "tensor", "channel", "group", "block", "tensor_group")
    size = weights.values.get("group_size")
    per_group = None if size in (None, -1) else weights.integer("group_size", 1, 1 << 16)
    match form:
        case "pack-quantized" if kind == "int" and bits <= 8:
            return Scheme("packed", bits, per_group, symmetric)
        case "int-quantized" | "naive-quantized" if kind == "int" and bits == 8:
            return Scheme("int8", bits, per_group, symmetric, _rounds_inputs(group))
        case "float-quantized" | "naive-quantized" if kind == "float" and bits == 8 and symmetric:
            return Scheme("float8", bits, per_group)
        case "nvfp4-pack-quantized" if kind == "float" and bits == 4 and symmetric:
            return Scheme("nvfp4", bits, 16)
        case "mxfp4-pack-quantized" if kind == "float" and bits == 4 and symmetric:
            return Scheme("mxfp4_packed", bits, 32)
    raise ModelError(
        f"{group.where}: weights of {bits} bits, type {quoted(kind)}, symmetric {quoted(symmetric)} in format "
        f"{quoted(form)} are not supported; pack-quantized, int-quantized, float-quantized, naive-quantized, "
        "nvfp4-pack-quantized and mxfp4-pack-quantized are."
    )


def _rounds_inputs(group: Fields) -> bool:
    """Return whether activations are integers of 8 bits, with scales for each token or from the checkpoint."""
    found = group.values.get("input_activations")
    return isinstance(found, dict) and found.get("num_bits") == 8 and found.get("type", "int") == "int"


def _check_pattern(pattern: str, where: str) -> None:
    try:
        _compiled(pattern)
    except re2.error as error:
        raise ModelError(f"{where}: the pattern {quoted(pattern)} is not supported: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    found = error.args[0] if error.args else "it is malformed"
    return shortened(found.decode(errors="replace") if isinstance(found, bytes) else str(found))


_KV_TYPES: Final[dict[str, KvScaleForm]] = {"float": "fp8", "int": "int8"}
_KV_ALGORITHMS: Final[dict[str, KvScaleForm]] = {"FP8": "fp8", "INT8": "int8"}
_METHODS: Final = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
    "torchao": _torchao,
    "quanto": _quanto,
}
