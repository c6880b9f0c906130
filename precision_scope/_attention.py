"""Fused attention in single steps, whose products are emulated as others are.

Its own kernel is run as well: it gives the results their strides, and says what
those of queries are that attend to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def attention(own: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Do what fused attention on the CPU does, given its own kernel."""
    query, key, value, *others = args
    output, logarithms = results = own(*args, **options)
    scores = _scores(query, key, is_causal=any(others[1:2]), **options)
    found = scores.logsumexp(-1)
    attends = found.isfinite()
    weights = (scores - found[..., None]).exp()
    logarithms.copy_(torch.where(attends, found, logarithms))
    output.copy_(torch.where(attends[..., None], weights @ _for_each_head(query, value), output))
    return results


def attention_backward(own: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Do what its backward pass does."""
    gradient, query, key, value, output, logarithms, _dropout_p, is_causal = args
    results = own(*args, **options)
    scores = _scores(query, key, is_causal=is_causal, **options)
    weights = (scores - logarithms[..., None]).exp()
    of_weights = gradient @ _for_each_head(query, value).mT - (gradient * output).sum(-1, keepdim=True)
    of_scores = weights * of_weights * _scale(query, **options)
    found = (of_scores @ _for_each_head(query, key), of_scores.mT @ query, weights.mT @ gradient)
    for result, of_heads in zip(results, found, strict=True):
        result.copy_(of_heads.reshape(len(result), result.shape[1], -1, *result.shape[2:]).sum(2))
    return results


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    is_causal: bool,
    attn_mask: torch.Tensor | None = None,
    **scale: Any,
) -> torch.Tensor:
    scores = query @ _for_each_head(query, key).mT * _scale(query, **scale)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores if attn_mask is None else scores + attn_mask


def _for_each_head(query: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Repeat keys or values that several heads share."""
    return shared.repeat_interleave(query.shape[1] // shared.shape[1], 1)


def _scale(query: torch.Tensor, scale: float | None = None, **_others: Any) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale
