#ifndef NVOS_H
#define NVOS_H
#include "nvtypes.h"
typedef struct { NvHandle hClient; NvHandle hObject; NvU32 cmd; NvU32 flags;
	NvP64 params NV_ALIGN_BYTES(8); NvU32 paramsSize; NvU32 status; } NVOS54_PARAMETERS;
typedef struct { NvHandle hRoot; NvHandle hObjectParent; NvHandle hObjectNew; NvU32 hClass;
	NvP64 pAllocParms NV_ALIGN_BYTES(8); NvU32 paramsSize; NvU32 status; } NVOS21_PARAMETERS;
typedef struct { NvHandle hRoot; NvHandle hObjectParent; NvHandle hObjectNew; NvU32 hClass;
	NvP64 pAllocParms NV_ALIGN_BYTES(8); NvP64 pRightsRequested NV_ALIGN_BYTES(8);
	NvU32 paramsSize; NvU32 flags; NvU32 status; } NVOS64_PARAMETERS;
#endif
