static const struct NVOC_EXPORTED_METHOD_DEF __nvoc_exported_method_def_Toy[] = {
    {               /*  [0] */
#if NVOC_EXPORTED_METHOD_DISABLED_BY_FLAG(0x408u)
        /*pFunc=*/      (void (*)(void)) NULL,
#else
        /*pFunc=*/      (void (*)(void)) &toyGet_IMPL,
#endif
        /*flags=*/      0x408u,
        /*accessRight=*/0x0u,
        /*methodId=*/   0x201u,
        /*paramSize=*/  sizeof(NV0000_CTRL_TOY_GET_PARAMS),
        /*pClassInfo=*/ &x,
#if NV_PRINTF_STRINGS_ALLOWED
        /*func=*/       "toyGet"
#endif
    },
    {               /*  [1] */
#if NVOC_EXPORTED_METHOD_DISABLED_BY_FLAG(0x8u)
        /*pFunc=*/      (void (*)(void)) NULL,
#else
        /*pFunc=*/      (void (*)(void)) &toyList_IMPL,
#endif
        /*flags=*/      0x8u,
        /*accessRight=*/0x0u,
        /*methodId=*/   0x202u,
        /*paramSize=*/  sizeof(NV0000_CTRL_TOY_LIST_PARAMS),
        /*pClassInfo=*/ &x,
#if NV_PRINTF_STRINGS_ALLOWED
        /*func=*/       "toyList"
#endif
    },
    {               /*  [2] */
#if NVOC_EXPORTED_METHOD_DISABLED_BY_FLAG(0x4u)
        /*pFunc=*/      (void (*)(void)) NULL,
#else
        /*pFunc=*/      (void (*)(void)) &toyOldV2_IMPL,
#endif
        /*flags=*/      0x4u,
        /*accessRight=*/0x0u,
        /*methodId=*/   0x204u,
        /*paramSize=*/  sizeof(NV0000_CTRL_TOY_OLD_V2_PARAMS),
        /*pClassInfo=*/ &x,
#if NV_PRINTF_STRINGS_ALLOWED
        /*func=*/       "toyOldV2"
#endif
    },
    {               /*  [3] */
#if NVOC_EXPORTED_METHOD_DISABLED_BY_FLAG(0x8u)
        /*pFunc=*/      (void (*)(void)) NULL,
#else
        /*pFunc=*/      (void (*)(void)) &toyStray_IMPL,
#endif
        /*flags=*/      0x8u,
        /*accessRight=*/0x0u,
        /*methodId=*/   0x205u,
        /*paramSize=*/  sizeof(NV0000_CTRL_TOY_STRAY_PARAMS),
        /*pClassInfo=*/ &x,
#if NV_PRINTF_STRINGS_ALLOWED
        /*func=*/       "toyStray"
#endif
    },
    {               /*  [4] */
#if NVOC_EXPORTED_METHOD_DISABLED_BY_FLAG(0x88u)
        /*pFunc=*/      (void (*)(void)) NULL,
#else
        /*pFunc=*/      (void (*)(void)) &toyBare_IMPL,
#endif
        /*flags=*/      0x88u,
        /*accessRight=*/0x0u,
        /*methodId=*/   0x206u,
        /*paramSize=*/  0 /* Singleton parameter list */,
        /*pClassInfo=*/ &x,
#if NV_PRINTF_STRINGS_ALLOWED
        /*func=*/       "toyBare"
#endif
    },
    {               /*  [5] */
#if NVOC_EXPORTED_METHOD_DISABLED_BY_FLAG(0x8u)
        /*pFunc=*/      (void (*)(void)) NULL,
#else
        /*pFunc=*/      (void (*)(void)) &toyExport_IMPL,
#endif
        /*flags=*/      0x8u,
        /*accessRight=*/0x0u,
        /*methodId=*/   0x3d05u,
        /*paramSize=*/  sizeof(NV0000_CTRL_OS_UNIX_EXPORT_OBJECT_TO_FD_PARAMS),
        /*pClassInfo=*/ &x,
#if NV_PRINTF_STRINGS_ALLOWED
        /*func=*/       "toyExport"
#endif
    },
};
const struct NVOC_EXPORT_INFO __nvoc_export_info_Toy = 
{
    /*numEntries=*/     6,
    /*pExportEntries=*/ __nvoc_exported_method_def_Toy
};
