#define ENTRY(_cmd, _func) _ENTRY_WITH_USER(_cmd, _func, NULL, NULL, 0)
        ENTRY(NVKMS_IOCTL_FREE_DEVICE, FreeDevice),
