struct NvKmsFreeDeviceParams { struct { NvU32 deviceHandle; } request; struct { NvU32 padding; } reply; };
