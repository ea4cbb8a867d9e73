"""Builds a partial wheel of flash-attn 2 from its source distribution in minutes, for Hopper GPUs.

    python benchmarks/jobs/build_flash.py flash_attn-2.8.3.tar.gz build/flash [--jobs 16]

The whole package takes hours to compile. This builds the forward pass over pages in bf16 for heads of 64 and 128 on
sm_90, without dropout, ALiBi, windows and soft-caps; anything else raises an error. The kernels are unchanged. Run it
with the Python that the wheel is for. It needs torch's headers, but no GPU. The last line printed is the wheel's path.
CUDA_HOME selects an nvcc other than the first in PATH.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MODULE = "flash_attn_2_cuda"
HEAD_DIMS = (64, 128)
UNITS = [f"flash_fwd_split_hdim{d}_bf16_{causal}sm80.cu" for d in HEAD_DIMS[::-1] for causal in ("causal_", "")]
"""The kernels for attention over pages."""
LEFT_OUT = [f"-DFLASHATTENTION_DISABLE_{part}" for part in
            ("BACKWARD", "DROPOUT", "ALIBI", "SOFTCAP", "UNEVEN_K", "LOCAL")]  # fmt: skip
SWITCHES = """
#undef FP16_SWITCH
#undef HEADDIM_SWITCH
#define FP16_SWITCH(COND, ...)                                       \\
  [&] {                                                              \\
    TORCH_CHECK(!(COND), "this build of flash-attn is for bfloat16"); \\
    using elem_type = cutlass::bfloat16_t;                           \\
    return __VA_ARGS__();                                            \\
  }()
#define HEADDIM_SWITCH(HEADDIM, ...)                                          \\
  [&] {                                                                       \\
    TORCH_CHECK(HEADDIM == 64 || HEADDIM == 128, "this build has heads of 64 and 128"); \\
    if (HEADDIM == 64) {                                                      \\
      constexpr static int kHeadDim = 64;                                     \\
      return __VA_ARGS__();                                                   \\
    } else {                                                                  \\
      constexpr static int kHeadDim = 128;                                    \\
      return __VA_ARGS__();                                                   \\
    }                                                                         \\
  }()
"""


def _refusal(name: str, parameters: str, why: str) -> str:
    return "".join(
        f"template<> void {name}<cutlass::bfloat16_t, {d}, {causal}>({parameters} &, cudaStream_t) "
        f'{{ TORCH_CHECK(false, "this build of flash-attn has no {why}"); }}\n'
        for d in HEAD_DIMS
        for causal in ("true", "false")
    )


REFUSALS = f"""
#include <torch/python.h>
#include <cutlass/numeric_types.h>
#include "namespace_config.h"
#include "flash.h"
namespace FLASH_NAMESPACE {{
{_refusal("run_mha_bwd_", "Flash_bwd_params", "backward pass")}
{_refusal("run_mha_fwd_", "Flash_fwd_params", "attention but over pages")}
}}
"""
"""Definitions of symbols that `flash_api.cpp` references."""


def cuda_home() -> Path:
    if home := os.environ.get("CUDA_HOME"):
        return Path(home)
    nvcc = shutil.which("nvcc")
    found = Path(nvcc).resolve().parents[1] if nvcc else Path("/usr/local/cuda")
    if not (found / "bin/nvcc").exists():
        raise SystemExit("no nvcc: set CUDA_HOME to the folder of the CUDA toolkit")
    return found


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("torch is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def sources(archive: Path, place: Path) -> Path:
    """Unpacks the needed part of the source distribution and narrows two switches."""
    with tarfile.open(archive) as tar:
        root = tar.getnames()[0].split("/")[0]
        kept = tuple(
            f"{root}/{part}" for part in ("csrc/flash_attn/", "csrc/cutlass/include/", "flash_attn/", "PKG-INFO")
        )
        tar.extractall(place, [m for m in tar if m.name.startswith(kept)], filter="data")
    code = place / root / "csrc/flash_attn"
    switch = code / "src/static_switch.h"
    switch.write_text(switch.read_text() + SWITCHES)
    (code / "refusals.cpp").write_text(REFUSALS)
    return place / root


def compile_all(root: Path, objects: Path, jobs: int) -> list[Path]:
    """Compiles every unit in parallel, slowest first. Raises `SystemExit` with the compiler's output."""
    cuda, torch, code = cuda_home(), torch_folder(), root / "csrc/flash_attn"
    include = [code, code / "src", root / "csrc/cutlass/include", torch / "include",
               torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"],
               cuda / "include", cuda / "include/cccl"]  # fmt: skip
    places = [f"-I{folder}" for folder in include]
    packaged = torch.parent / "nvidia/cu13/include"  # headers that the toolkit may lack, such as cuBLAS'
    places += ["-isystem", str(packaged)] if packaged.is_dir() else []
    common = ["-O3", "-std=c++17", "-w", *LEFT_OUT, f"-DTORCH_EXTENSION_NAME={MODULE}", *places]
    nvcc = [
        str(cuda / "bin/nvcc"), *common, *(f"-U__CUDA_NO_{name}__" for name in (
            "HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")),
        "--expt-relaxed-constexpr", "--expt-extended-lambda", "--use_fast_math",
        "-gencode", "arch=compute_90,code=sm_90", "-Xcompiler", "-fPIC", "-c",
    ]  # fmt: skip
    begun = time.monotonic()

    def build(source: Path) -> Path:
        made = objects / f"{source.stem}.o"
        if made.exists() and made.stat().st_size:
            return made
        command = nvcc if source.suffix == ".cu" else ["g++", *common, "-fPIC", "-c"]
        part = made.with_suffix(".part")
        ended = subprocess.run([*command, str(source), "-o", str(part)], capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"{source.name}:\n{(ended.stdout + ended.stderr)[-3000:]}")
        part.rename(made)
        print(f"{time.monotonic() - begun:6.1f} s {source.name}", flush=True)
        return made

    units = [*(code / "src" / unit for unit in UNITS), code / "flash_api.cpp", code / "refusals.cpp"]
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(build, units))


def link(objects: list[Path], made: Path) -> None:
    cuda, torch = cuda_home(), torch_folder()
    folders = [cuda / "lib64", cuda / "lib", cuda / "targets/x86_64-linux/lib", torch.parent / "nvidia/cu13/lib"]
    runtimes = [path for folder in folders for path in sorted(folder.glob("libcudart.so*"))]
    if not runtimes:
        raise SystemExit(f"no libcudart.so in {', '.join(map(str, folders))}")
    libraries = [f"-l{name}" for name in ("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda", "torch_python")]
    command = ["g++", "-shared", "-o", str(made), *map(str, objects), f"-L{torch / 'lib'}", *libraries,
               str(runtimes[0])]  # fmt: skip
    subprocess.run(command, check=True)


def wheel(root: Path, module: Path, folder: Path) -> Path:
    """Packs the Python files and the module, with a version that marks a partial build."""
    facts = dict(line.split(": ", 1) for line in (root / "PKG-INFO").read_text().split("\n\n")[0].splitlines()
                 if ": " in line)  # fmt: skip
    version = f"{facts['Version']}+pages.bf16.sm90"
    abi = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag, info = f"{abi}-{abi}-linux_x86_64", f"flash_attn-{version}.dist-info"
    files = {f"flash_attn/{path.relative_to(root / 'flash_attn')}": path.read_bytes()
             for path in sorted((root / "flash_attn").rglob("*.py"))}  # fmt: skip
    files[module.name] = module.read_bytes()
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {version}\n".encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: weft\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    record = ""
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(content)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    made = folder / f"flash_attn-{version}-{tag}.whl"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("archive", type=Path, help="the source distribution")
    parser.add_argument("folder", type=Path, help="folder for the wheel and for objects, which a second run reuses")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel compilers")
    given = parser.parse_args()
    objects = given.folder / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    root = sources(given.archive, given.folder)
    module = given.folder / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    link(compile_all(root, objects, given.jobs), module)
    print(wheel(root, module, given.folder))


if __name__ == "__main__":
    main()
