"""`packed_engine.py FORMAT [profile|warm] [OPTIONS]`: tokens/s of an 8B shape with random weights, 1 to 128 requests.

FORMAT is bf16, gptq, awq or gptq32. `profile` prints the kernels of decode iterations of one request and of 16 instead;
`warm` only compiles.
OPTIONS: engine options as JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import torch

from weft.engine.llm import LLM
from weft.engine.model.hub import find_model
from weft.engine.wire.sampling import SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QUANTIZED = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq32": {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
}


def main() -> None:
    name, profiles = sys.argv[1], "profile" in sys.argv[2:3]
    folder = Path(f"/tmp/packed-{name}")
    folder.mkdir(exist_ok=True)
    config = CONFIG | ({"quantization_config": QUANTIZED[name]} if name in QUANTIZED else {})
    (folder / "config.json").write_text(json.dumps(config))
    if not (folder / "tokenizer.json").exists():
        for file in find_model("demo").glob("*token*"):
            shutil.copy(file, folder / file.name)
    begin = time.monotonic()
    options = {"quantization": "packed"} if name in QUANTIZED else {}
    if sys.argv[-1].startswith("{"):
        options = json.loads(sys.argv[-1])
    llm = LLM(
        str(folder), load_format="dummy", max_num_seqs=128, max_num_batched_tokens=512, num_pages=600, tuning_seconds=0,
        **options,
    )  # fmt: skip
    print(name, "started in", round(time.monotonic() - begin, 1), flush=True)
    if "warm" in sys.argv[2:3]:
        for count in (1, 16, 32, 64, 128):
            generate(llm, count, 8)
        return
    if profiles:
        for count in (1, 16):
            profile(llm, name, count)
        return
    for count in (1, 1, 2, 4, 8, 16, 32, 64, 128):
        tokens = 150 if count <= 16 else 80
        times = []
        for n in (8, tokens):
            torch.cuda.synchronize()
            at = time.monotonic()
            generate(llm, count, n)
            times.append(time.monotonic() - at)
        step = (times[1] - times[0]) / (tokens - 8)
        print(name, "requests", count, f"TPOT {step * 1e3:.3f} ms, {count / step:.0f} tokens/s", flush=True)


def generate(llm: LLM, count: int, tokens: int) -> None:
    prompts = [[5 + i, 7, 9, 11] for i in range(count)]
    llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True), progress=False)


def profile(llm: LLM, name: str, count: int, tokens: int = 21) -> None:
    """Print each kernel's microseconds and launches an iteration, and the time in which no kernel runs."""
    generate(llm, count, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as run:
        generate(llm, count, tokens)
        torch.cuda.synchronize()
    kernels = [e for e in run.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range]
    kernels.sort(key=lambda e: e.time_range.start)
    kernels = kernels[len(kernels) // 3 :]  # decodes alone
    found: dict[str, list[float]] = {}
    for e in kernels:
        found.setdefault(e.name, []).append(e.time_range.end - e.time_range.start)
    rounds = max(1.0, (tokens - 1) * 2 / 3)
    span = kernels[-1].time_range.end - kernels[0].time_range.start
    busy = sum(map(sum, found.values()))
    print(
        name, "requests", count, f"span {span / rounds:.0f} us, kernels {busy / rounds:.0f} us an iteration", flush=True
    )
    for kernel, us in sorted(found.items(), key=lambda item: -sum(item[1]))[:14]:
        us.sort()
        middle = " ".join(f"{us[int(q * (len(us) - 1))]:.1f}" for q in (0.1, 0.5, 0.9))
        print(name, f"{sum(us) / rounds:8.1f} us  {len(us) / rounds:6.1f} x  {middle}  {kernel[:70]}", flush=True)


if __name__ == "__main__":
    main()
