/* A small world in the shape of the real one, written for abi-extract's tests. */
#ifndef NVTYPES_H
#define NVTYPES_H
typedef unsigned char NvU8;
typedef unsigned char NvBool;
typedef unsigned short NvU16;
typedef unsigned int NvU32;
typedef unsigned long long NvU64;
typedef NvU32 NvHandle;
typedef NvU64 NvP64;
#define NV_ALIGN_BYTES(n) __attribute__((aligned(n)))
#define NV_DECLARE_ALIGNED(field, n) field __attribute__((aligned(n)))
#endif
