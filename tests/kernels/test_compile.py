"""The kernels beside the GEMMs compile for Hopper, and the memory-bound ones move 16 bytes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SHARED_BYTES_LIMIT = 232_448
MOVERS = {"permute_kernel", "swiglu_kernel", "combine_kernel", "cast_kernel", "zero_kernel"}


@pytest.mark.slow
def test_compiles_for_hopper(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_for_hopper.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    assert Counter(fact["kernel"] for fact in facts) == {
        "count_kernel": 1,
        "place_kernel": 3,
        **dict.fromkeys(MOVERS - {"combine_kernel"}, 2),
        "combine_kernel": 4,
        "softmax_kernel": 1,
        "grouped_kernel": 1,
    }
    for fact in facts:
        assert fact["shared_bytes"] <= SHARED_BYTES_LIMIT
        if fact["kernel"] in MOVERS:
            assert fact["wide_stores"] > 0, fact
            assert fact["wide_loads"] > 0 or fact["kernel"] == "zero_kernel", fact
