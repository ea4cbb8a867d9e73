"""Times latent attention of decodes next to its bounds: `python -m weft.tools.kernels.bench_latent`.

DeepSeek's rows of 512 + 64 numbers, for all 128 heads and for a rank's 16. Each row has the largest error against the
definition in float32, and the fractions of a copy's bandwidth and of bfloat16 GEMMs' speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from weft import output_file
from weft.kernels.attention.work_lists import decode_items
from weft.kernels.tuning.measure import Meter, sustained
from weft.tools.kernels import latent_decode
from weft.tools.kernels.calls import copy_bandwidth
from weft.tools.kernels.latent_decode import Tile

RANK, ROTATED, PAGE, DTYPE, SCALE = 512, 64, 64, torch.bfloat16, 0.07
BATCHES = ((1, 8192), (8, 8192), (64, 4096), (256, 1024))  # Requests and their tokens.
HEADS = (128, 16)
SLOTS = 512
TILES = [
    Tile(heads, keys, stages, warps)
    for heads, keys, stages, warps in itertools.product((16, 32, 64), (32, 64), (1, 2), (4, 8))
]


def calls(
    heads: int, requests: int, length: int, layers: int, num_sms: int, device: str = "cuda"
) -> tuple[list[Callable[[], torch.Tensor]], float]:
    """Return one call for each layer, and the largest error of the first over the largest value."""
    width, count = RANK + ROTATED, -(-length // PAGE)
    table = (1 + torch.randperm(requests * count, device=device)).view(requests, count).to(torch.int32)
    kv = torch.randn(requests * count + 1, layers, 1, PAGE, 1, width, device=device, dtype=DTYPE)
    q = torch.randn(requests, heads, width, device=device, dtype=DTYPE)
    items = decode_items(
        np.full(requests, length), num_kv_heads=latent_decode.head_blocks(heads), num_programs=num_sms, max_slots=SLOTS
    )
    space = latent_decode.latent_workspace(SLOTS, requests, heads, RANK, device)
    out = torch.empty(requests, heads * RANK, device=device, dtype=DTYPE)
    work = torch.from_numpy(items).to(device), torch.tensor([len(items)], dtype=torch.int32, device=device)
    own = [
        partial(latent_decode.latent_decode, q, kv, layer, table, *work, out=out, num_sms=num_sms, space=space,
                scale=SCALE, rank=RANK)
        for layer in range(layers)
    ]  # fmt: skip
    rows = kv[table[0].long(), 0].reshape(-1, width)[:length].float()
    expected = torch.softmax(q[0].float() @ rows.T * SCALE, -1) @ rows[:, :RANK]
    found = own[0]()[0].view(heads, RANK).float()
    return list(own), float((found - expected).abs().max() / expected.abs().max())


def gemm_speed(meter: Meter, seconds: float) -> float:
    """Return operations per microsecond of a large GEMM."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=DTYPE) for _ in range(2))
    return float(2 * 8192**3 / (sustained([partial(torch.mm, a, b)], meter, seconds).ms * 1e3))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0] + ".")
    parser.add_argument("--seconds", type=float, default=0.6, help="length of each measurement")
    parser.add_argument("--sweep", action="store_true", help="try other tiles at 64 requests")
    parser.add_argument("--json", type=output_file, help="write the rows here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    meter, bandwidth = Meter(), copy_bandwidth()
    speed, rows = gemm_speed(meter, options.seconds), list[dict[str, object]]()
    chosen = latent_decode.tile()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth:.2f} TB/s, GEMM {speed / 1e6:.0f} TFLOP/s, {chosen}")
    sweep = [(64, 4096, tile) for tile in TILES] if options.sweep else []
    for heads, (requests, length, tile) in itertools.product(HEADS, [*((*batch, chosen) for batch in BATCHES), *sweep]):
        latent_decode.tile = partial(Tile, *tile)
        row: dict[str, object] = {"heads": heads, "requests": requests, "tokens": length, **tile._asdict()}
        size = requests * length * (RANK + ROTATED) * 2
        try:
            own, error = calls(heads, requests, length, max(1, min(16, -(-300_000_000 // size))), num_sms)
            us = sustained(own, meter, options.seconds).ms * 1e3
            work = 2 * heads * (2 * RANK + ROTATED) * requests * length
            row |= {"us": us, "error": error, "of_copy": size / us / 1e6 / bandwidth, "of_gemm": work / us / speed}
        except Exception as failure:  # a tile that does not fit is a row of the sweep
            row["failed"] = str(failure)[:100]
        rows.append(row)
        print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
        if options.json:
            with open(options.json, "w") as file:
                json.dump(rows, file, indent=1)
    meter.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
