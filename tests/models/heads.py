"""Rows of a query-key-value projection in our order, out of the order that others keep."""

import torch


def by_head(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """All queries, then all keys, then all values -> head by head, each with its query, key and value."""
    return rows.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
