"""The kernels' one door: checks shapes and dtypes, then picks the twin for the tensor's device.

`reference=True` takes the torch twin wherever the tensors are; else CUDA tensors go to the Triton
twin if there is one.
"""

from __future__ import annotations

import torch

from asyncinfer.kernels.reference.decode_inputs import DecodeInputs
from asyncinfer.kernels.twins import twin
from asyncinfer.kernels.workspace import AttentionWorkspace

__all__ = [
    "add_rms_norm",
    "decode_inputs",
    "gelu_mul",
    "grouped_linear",
    "kv_write",
    "linear_small",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_kv_write",
    "sample",
    "silu_mul",
]

#: What a cache may hold instead of the queries' dtype, with a scale per token and head.
_QUANTISED = (torch.float8_e4m3fn, torch.int8)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    reference: bool = False,
) -> torch.Tensor:
    """`x` `[..., size]`, `weight` `[size]` of the same dtype; `plus_one` multiplies by
    `1 + weight`."""
    _check(x.ndim >= 1 and weight.shape == x.shape[-1:], "rms_norm", x, weight)
    run = twin("rms_norm", x, reference)
    result: torch.Tensor = run(x, weight, eps, plus_one=plus_one)
    return result


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    plus_one: bool = False,
    reference: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`residual += x` in place; gives `rms_norm(residual)` and `residual`. All of one dtype, `x`
    and `residual` `[tokens, size]`, `weight` `[size]`."""
    fits = x.ndim == 2 and x.shape == residual.shape and weight.shape == x.shape[1:]
    fits = fits and x.dtype is residual.dtype and residual.stride(1) == 1
    _check(fits, "add_rms_norm", x, residual, weight)
    run = twin("add_rms_norm", x, reference)
    result: tuple[torch.Tensor, torch.Tensor] = run(x, residual, weight, eps, plus_one=plus_one)
    return result


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, reference: bool = False
) -> torch.Tensor:
    """`x` `[tokens, heads, head_dim]`; `cos`, `sin` float32 `[tokens, 1, head_dim]`, the first half
    of the sines negated."""
    expected = (x.shape[0], 1, x.shape[-1])
    right = x.ndim == 3 and cos.shape == expected and sin.shape == expected
    _check(right and cos.dtype is sin.dtype is torch.float32, "rope", x, cos, sin)
    result: torch.Tensor = twin("rope", x, reference)(x, cos, sin)
    return result


def silu_mul(gate_up: torch.Tensor, *, reference: bool = False) -> torch.Tensor:
    """`gate_up` `[tokens, 2 * size]`, gate before up."""
    _check(gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0, "silu_mul", gate_up)
    result: torch.Tensor = twin("silu_mul", gate_up, reference)(gate_up)
    return result


def gelu_mul(
    gate_up: torch.Tensor, *, approximate: str = "none", reference: bool = False
) -> torch.Tensor:
    """`gate_up` `[tokens, 2 * size]`, gate before up; `approximate` "none" or "tanh"."""
    _check(gate_up.ndim == 2 and gate_up.shape[1] % 2 == 0, "gelu_mul", gate_up)
    if approximate not in ("none", "tanh"):
        raise ValueError(f"kernel gelu_mul: approximate={approximate!r}: must be none or tanh")
    run = twin("gelu_mul", gate_up, reference)
    result: torch.Tensor = run(gate_up, approximate=approximate)
    return result


def linear_small(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
    reference: bool = False,
) -> torch.Tensor:
    """`x W^T + bias` of at most 64 tokens, a norm before and a gate or residual after it; all of
    one dtype, or the weight int8 with `scales`. See the reference twin."""
    name = "linear_small"
    _check(x.ndim == weight.ndim == 2 and x.shape[1] == weight.shape[1], name, x, weight)
    _check_weight(name, x, weight, scales)
    _check_range(name, "tokens", x.shape[0], 0, 64)
    outputs, inputs = weight.shape
    if activation not in (None, "silu", "gelu", "gelu_tanh"):
        known = "silu, gelu, gelu_tanh or None"
        raise ValueError(f"kernel {name}: activation={activation!r}: must be {known}")
    size = outputs if activation is None else outputs // 2
    _check(activation is None or outputs % 2 == 0, name, x, weight)
    _check(bias is None or bias.shape == (outputs,), name, weight, bias)
    _check(norm is None or norm.shape == (inputs,), name, weight, norm)
    if residual is not None:
        right = residual.shape == (x.shape[0], size) and residual.dtype is x.dtype
        _check(right and residual.stride(1) == 1, name, x, weight, residual)
    if arrivals is not None:
        enough = arrivals.dtype is torch.int32 and arrivals.numel() * 64 >= outputs
        _check(enough, name, weight, arrivals)
    result: torch.Tensor = twin(name, x, reference)(
        x,
        weight,
        bias,
        scales=scales,
        norm=norm,
        eps=eps,
        plus_one=plus_one,
        activation=activation,
        residual=residual,
        arrivals=arrivals,
    )
    return result


def sample(
    logits: torch.Tensor,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    reference: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A token, the largest logit and the token's logprob for each row of `logits` `[n, vocab]`;
    options by row, greedy without a temperature. See the reference twin."""
    right = logits.ndim == 2 and logits.shape[1] > 0 and logits.stride(1) == 1
    _check(right and logits.is_floating_point(), "sample", logits)
    rows = logits.shape[:1]
    if temperature is not None:
        _check(seeds is not None and seeds.dtype is torch.int64, "sample", logits, seeds)
        known = positions is not None and positions.dtype in (torch.int32, torch.int64)
        _check(known, "sample", logits, positions)
        for keys in (seeds, positions):
            _check(keys is not None and keys.shape == rows, "sample", logits, keys)
    options = ((temperature, torch.float32), (top_k, torch.int32), (top_p, torch.float32))
    for option, dtype in (*options, (min_p, torch.float32)):
        right = option is None or (option.shape == rows and option.dtype is dtype)
        _check(right and (option is None or temperature is not None), "sample", logits, option)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = twin("sample", logits, reference)(
        logits, seeds, positions, temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    return result


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    reference: bool = False,
) -> torch.Tensor:
    """Each row of `x` `[n, in]`, sorted by expert, times its expert's part of `weight`
    `[experts, out, in]`; all of one dtype, or the weight int8 with `scales`. See the reference
    twin."""
    name = "grouped_linear"
    _check(x.ndim == 2 and weight.ndim == 3 and x.shape[1] == weight.shape[2], name, x, weight)
    _check_weight(name, x, weight, scales)
    right = ends.dtype is torch.int32 and ends.shape == weight.shape[:1] and ends.is_contiguous()
    _check(right and ends.numel() > 0, name, weight, ends)
    right = bias is None or (bias.shape == weight.shape[:2] and bias.is_contiguous())
    _check(right, name, weight, bias)
    result: torch.Tensor = twin(name, x, reference)(x, weight, ends, bias, scales=scales)
    return result


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    reference: bool = False,
) -> None:
    """`k`, `v` `[tokens, kv_heads, head_dim]` into caches `[num_blocks, kv_heads, block_size,
    head_dim]` at `slot_mapping` int64 `[tokens]`, -1 for nowhere; see the reference twin."""
    _check(k.ndim == 3 and k.shape == v.shape and k.dtype is v.dtype, "kv_write", k, v)
    _check_caches("kv_write", k, k_cache, v_cache, slot_mapping, k_scales, v_scales)
    _check(k.shape[1:] == (k_cache.shape[1], k_cache.shape[3]), "kv_write", k, k_cache)
    run = twin("kv_write", k, reference)
    run(k, v, k_cache, v_cache, slot_mapping, k_scales=k_scales, v_scales=v_scales)


def rope_kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    reference: bool = False,
) -> torch.Tensor:
    """Packed `qkv` `[tokens, heads + 2 * kv_heads, head_dim]`: normalised, rotated, keys and values
    written; gives the queries. See the reference twin."""
    name = "rope_kv_write"
    _check(qkv.ndim == 3 and cos.ndim == 3, name, qkv, cos)
    _check_caches(name, qkv, k_cache, v_cache, slot_mapping, k_scales, v_scales)
    tokens, packed, head_dim = qkv.shape
    _check(packed > 2 * k_cache.shape[1] and head_dim == k_cache.shape[3], name, qkv, k_cache)
    rotary = cos.shape[2]
    right = cos.shape == sin.shape == (tokens, 1, rotary) and 0 < rotary <= head_dim
    right = right and rotary % 2 == 0 and cos.dtype is sin.dtype is torch.float32
    _check(right, name, qkv, cos, sin)
    for norm in (q_norm, k_norm):
        _check(norm is None or norm.shape == (head_dim,), name, qkv, norm)
    result: torch.Tensor = twin(name, qkv, reference)(
        qkv,
        cos,
        sin,
        k_cache,
        v_cache,
        slot_mapping,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        plus_one=plus_one,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    return result


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    decode_rows: int = 0,
    max_query_len: int = 1,
    splits: int | None = None,
    chunk: int | None = None,
    workspace: AttentionWorkspace | None = None,
    reference: bool = False,
) -> torch.Tensor:
    """Causal attention of `q` `[tokens, heads, head_dim]` over paged KV; see the reference twin for
    what it computes, the Triton one for `decode_rows` and what follows it."""
    name = "paged_attention"
    _check(q.ndim == 3 and k_cache.ndim == 4, name, q, k_cache)
    _check(
        k_cache.shape == v_cache.shape and k_cache.dtype is v_cache.dtype, name, k_cache, v_cache
    )
    heads, rows = q.shape[1], seq_lens.shape[0]
    _check(q.shape[2] == k_cache.shape[3] and heads % k_cache.shape[1] == 0, name, q, k_cache)
    right = block_tables.ndim == 2 and block_tables.shape[0] == rows
    right = right and query_starts.shape == (rows + 1,)
    _check(right, name, block_tables, seq_lens, query_starts)
    _check(sinks is None or (sinks.shape, sinks.dtype) == ((heads,), torch.float32), name, q, sinks)
    expected = None if k_cache.dtype is q.dtype else k_cache.shape[:3]
    for scales in (k_scales, v_scales):
        right = (None if scales is None else scales.shape) == expected
        right = right and (scales is None or scales.dtype is torch.float32)
        _check(right and k_cache.dtype in (q.dtype, *_QUANTISED), name, q, k_cache, scales)
    _check_range(name, "window", window, 1, None)
    _check_range(name, "decode_rows", decode_rows, 0, rows)
    _check_range(name, "max_query_len", max_query_len, 1, 8)
    _check_range(name, "splits", splits, 1, None)
    _check_range(name, "chunk", chunk, 1, None)
    for field, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not value > 0:
            raise ValueError(f"kernel {name}: {field} is {value}, not above 0")
    result: torch.Tensor = twin(name, q, reference)(
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        query_starts,
        scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        k_scales=k_scales,
        v_scales=v_scales,
        decode_rows=decode_rows,
        max_query_len=max_query_len,
        splits=splits,
        chunk=chunk,
        workspace=workspace,
    )
    return result


def decode_inputs(
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    history: torch.Tensor,
    block_size: int,
    parts: int = 1,
    *,
    reference: bool = False,
) -> DecodeInputs:
    """The inputs of the next decode step of the slots `rows`, from what the device knows of them;
    all int32. See the reference twin."""
    name = "decode_inputs"
    given = rows, positions, tables, history
    _check(all(t.dtype is torch.int32 and t.is_contiguous() for t in given), name, *given)
    slots = positions.shape[0]
    right = rows.ndim == positions.ndim == 1 and tables.ndim == history.ndim == 2
    right = right and tables.shape[0] == history.shape[0] == slots
    _check(right and tables.shape[1] % parts == 0, name, *given)
    result: DecodeInputs = twin(name, rows, reference)(
        rows, positions, tables, history, block_size, parts
    )
    return result


def _check(right: bool, name: str, *tensors: torch.Tensor | None) -> None:
    if not right:
        seen = ", ".join("None" if t is None else f"{tuple(t.shape)} {t.dtype}" for t in tensors)
        raise ValueError(f"kernel {name}: shapes or dtypes that do not fit: {seen}")


def _check_weight(
    name: str, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None
) -> None:
    """A weight of the dtype of `x`, or of int8 and with a scale for each row."""
    expected = x.dtype if scales is None else torch.int8
    _check(weight.dtype is expected and weight.is_contiguous(), name, x, weight, scales)
    if scales is not None:
        right = scales.dtype is torch.float32 and scales.shape == weight.shape[:-1]
        _check(right and scales.is_contiguous(), name, weight, scales)


def _check_caches(
    name: str,
    new: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
) -> None:
    """Caches that `new` `[tokens, ...]` can be written to: each block in one piece, blocks perhaps
    apart; of the dtype of `new`, or quantised and with scales."""
    _check(k_cache.ndim == 4 and k_cache.shape == v_cache.shape, name, k_cache, v_cache)
    head_dim, block = k_cache.shape[3], k_cache.shape[2] * k_cache.shape[3]
    right = k_cache.stride() == v_cache.stride() and k_cache.stride()[1:] == (block, head_dim, 1)
    right = right and k_cache.dtype is v_cache.dtype
    _check(right and k_cache.dtype in (new.dtype, *_QUANTISED), name, new, k_cache, v_cache)
    for scales in (k_scales, v_scales):
        right = (scales is None) == (k_cache.dtype is new.dtype)
        if scales is not None:
            right = right and scales.shape == k_cache.shape[:3] and scales.is_contiguous()
            right = right and scales.dtype is torch.float32
        _check(right, name, k_cache, scales)
    right = slot_mapping.dtype is torch.int64 and slot_mapping.shape == new.shape[:1]
    _check(right, name, new, slot_mapping)


def _check_range(name: str, field: str, value: int | None, low: int, high: int | None) -> None:
    if value is not None and not low <= value <= (value if high is None else high):
        bound = f"below {low}" if value < low else f"above {high}"
        raise ValueError(f"kernel {name}: {field} is {value}, {bound}")
