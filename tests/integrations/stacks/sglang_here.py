"""SGLang's modules without its servers: what they import of other hardware is absent, and stands for nothing."""

from __future__ import annotations

import sys

from bare import Absent, bare

GPU_ONLY = ("torchvision", "torchaudio", "sgl_kernel", "flashinfer", "decord", "decord2", "deep_gemm", "cutlass")

if "sglang" not in sys.modules:
    sys.meta_path.insert(0, Absent(*GPU_ONLY, "torch_memory_saver", "tvm_ffi", "blobfile", "av", "timm"))
    bare("sglang", "sglang")
    sys.modules["sglang"].__version__ = "0"  # type: ignore[attr-defined]
