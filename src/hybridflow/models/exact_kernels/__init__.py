"""Triton kernels of exact mode: what they write for a row depends on nothing but that row. Importing this room needs triton."""

from hybridflow.models.exact_kernels.attention import (
    Form,
    Tiles,
    attend,
    attend_backward,
    count_keys,
    count_queries,
)
from hybridflow.models.exact_kernels.layout import align
from hybridflow.models.exact_kernels.products import add_product, multiply, multiply_rows
from hybridflow.models.exact_kernels.rows import cumulate_rows, log_softmax_rows, sum_rows

__all__ = [
    "Form",
    "Tiles",
    "add_product",
    "align",
    "attend",
    "attend_backward",
    "count_keys",
    "count_queries",
    "cumulate_rows",
    "log_softmax_rows",
    "multiply",
    "multiply_rows",
    "sum_rows",
]
