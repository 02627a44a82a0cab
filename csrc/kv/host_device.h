// Functions that the CPU and the GPU share: TM_HD before them. g++ sees an inline function, nvcc one for both sides.
#pragma once

#ifdef __CUDACC__
#define TM_HD __host__ __device__ __forceinline__
#define TM_UNROLL _Pragma("unroll")
#else
#define TM_HD inline
#define TM_UNROLL
#endif
