"""What becomes of the Triton twins outside the interpreter: the error of a CPU tensor, then a line for each kernel
compiled for a GPU that need not be there: name, architecture, bytes spilled, kinds of accesses to memory."""

from __future__ import annotations

import re
import sys

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torch_mooncake import triton_ops
from torch_mooncake.triton_ops import copying, deltas, hashing, scaling

ARCHS = (80, 90, 100)


def compile_one(kernel, arch: int, constants: dict, pointers: dict[str, str], wide: set[str], **options) -> None:
    """`constants`: constexprs, and strides known to be 1; all other numbers are multiples of 16, as the launcher finds
    those of pages, and int32 but for `wide`."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else pointers.get(name) or ("i64" if name in wide else "i32")
        for name in names
    }
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name] != "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = compiled.asm["ptx"]
    accesses = sorted(set(re.findall(r"(?:ld|st)\.global[.\w]*", ptx)))
    spilled = sum(int(n) for n in re.findall(r"\.local .*?\[(\d+)\]", ptx))
    print(kernel.__name__, arch, spilled, ",".join(accesses))


def main() -> int:
    try:
        triton_ops.gather_pages(torch.zeros(2, 2), torch.tensor([0]))
    except ValueError as error:
        print(f"ValueError: {error}".splitlines()[0])
    for arch in ARCHS:
        for strided in (False, True):
            constants = {"RUN": 32, "STRIDED": strided, "SRC_IDS": True, "DST_IDS": True, "ALIGNMENT": 16}
            constants |= {"WORD": tl.int64, "BLOCK": copying.BLOCK}
            pointers = dict.fromkeys(("table", "src_ids", "dst_ids"), "*i64")
            compile_one(
                copying._copy_kernel, arch, constants, pointers, {"src_page_stride", "dst_page_stride"}, num_warps=4
            )
        for kernel in (scaling._quantize_kernel, scaling._dequantize_kernel):
            constants = {"KIND": 2, "FP8": True, "BLOCK": scaling.BLOCK, "a5": 1, "b5": 1}
            pointers = {"wide_at": "*i16", "narrow_at": "*i8", "scales": "*fp32"}
            compile_one(kernel, arch, constants, pointers, set(), num_warps=4, enable_fp_fusion=False)
        pointers = {"base": "*i16", "fresh": "*i16", "values": "*i16", "tokens": "*u8", "blob": "*u8", "target": "*i16"}
        pointers |= dict.fromkeys(("positions", "groups", "counts", "tokens_of"), "*i32")
        pointers |= dict.fromkeys(("token_starts", "value_starts", "table"), "*i64")
        tokens = {"SEGMENT": deltas.SEGMENT, "FAR_GAP": deltas.FAR_GAP, "RUN": deltas.RUN}
        compile_one(deltas._find_kernel, arch, {"SEGMENT": deltas.SEGMENT}, pointers, set(), num_warps=8)
        constants = {**tokens, "WRITE": True, "SHORTEST_RUN": deltas.SHORTEST_RUN}
        compile_one(deltas._tokens_kernel, arch, constants, pointers, set(), num_warps=8)
        compile_one(deltas._apply_kernel, arch, {**tokens, "SIZE": 2}, pointers, set(), num_warps=1)
        for page_size in (16, 64):
            pointers = dict.fromkeys(("token_ids", "offsets", "rows", "roots", "hashes", "constants"), "*i64")
            compile_one(hashing._hash_kernel, arch, {"PAGE": page_size, "LANES": 32}, pointers, set(), num_warps=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
