#include "nvtypes.h"
typedef struct { NvHandle hParentClient; NvHandle hSrcResource; NvU32 hClass; NvU32 notifyIndex;
	NvP64 data NV_ALIGN_BYTES(8); } NV0005_ALLOC_PARAMETERS;
typedef struct { NvU32 version; union { NvU32 small; NvU64 large NV_ALIGN_BYTES(8); }; } TOY_ALLOC;
