RS_ENTRY(
    /* External Class */ NV01_EVENT,
    /* Internal Class */ Toy,
    NV_TRUE,
    /* Parents */ RS_ANY_PARENT,
    /* Params */ RS_REQUIRED(NV0005_ALLOC_PARAMETERS),
    RS_FREE_PRIORITY_DEFAULT,
    /* Flags */ RS_FLAGS_ALLOC_NON_PRIVILEGED | RS_FLAGS_ACQUIRE_GPUS_LOCK,
    RS_ACCESS_NONE
)
RS_ENTRY(
    /* External Class */ NV01_TOY,
    /* Internal Class */ Toy,
    NV_TRUE,
    /* Parents */ RS_LIST(classId(Device), classId(Subdevice)),
    /* Params */ RS_OPTIONAL(TOY_ALLOC),
    RS_FREE_PRIORITY_DEFAULT,
    /* Flags */ RS_FLAGS_ALLOC_PRIVILEGED,
    RS_ACCESS_NONE
)
RS_ENTRY(
    /* External Class */ NV01_BARE,
    /* Internal Class */ Toy,
    NV_TRUE,
    /* Parents */ RS_ROOT_OBJECT,
    /* Params */ RS_NONE,
    RS_FREE_PRIORITY_DEFAULT,
    /* Flags */ RS_FLAGS_NONE,
    RS_ACCESS_NONE
)
RS_ENTRY(
    /* External Class */ NV01_KERNEL,
    /* Internal Class */ Toy,
    NV_TRUE,
    /* Parents */ RS_LIST(classId(Device)),
    /* Params */ RS_NONE,
    RS_FREE_PRIORITY_DEFAULT,
    /* Flags */ RS_FLAGS_ALLOC_KERNEL_PRIVILEGED,
    RS_ACCESS_NONE
)
#if RMCFG_CLASS_X && (defined(DEBUG) || defined(DEVELOP))
RS_ENTRY(
    /* External Class */ NV01_DEBUG,
    /* Internal Class */ Toy,
    NV_TRUE,
    /* Parents */ RS_ANY_PARENT,
    /* Params */ RS_NONE,
    RS_FREE_PRIORITY_DEFAULT,
    /* Flags */ RS_FLAGS_NONE,
    RS_ACCESS_NONE
)
#endif
