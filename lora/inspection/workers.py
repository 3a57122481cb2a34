"""How the norms are computed: layers side by side, in products that suit the numbers of the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

#: Two of them take all that the memory has to give, and each takes 20 MB of it.
_MOST = 2


@contextmanager
def workers() -> Iterator[Callable]:
    """``map``, on two threads where torch may use two, each with one of torch: those of one product wait for each other
    at each step, which takes ten times as long where another program has one of the cores."""
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(min(cores, before, _MOST), initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield map if before == 1 else pool.map
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


@contextmanager
def bfloat16_products() -> Iterator[None]:
    """Within it, a CPU that multiplies bfloat16 (AMX, AVX512-BF16) takes the factors of float32 products as bfloat16.

    It adds up in float32. So the products are right where all factors are bfloat16 numbers that were converted, and
    take half the time; of others the last 16 bits are lost. It holds for the whole process, on the CPU. Elsewhere, and
    before torch 2.9, products stay what they are.
    """
    settings = getattr(torch.backends.mkldnn, "matmul", None)
    if settings is None:
        yield
        return
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
