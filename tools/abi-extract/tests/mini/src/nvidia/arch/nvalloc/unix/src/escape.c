        case NV_ESC_RM_ALLOC:
        case NV_ESC_RM_CONTROL:
        /* case NV_ESC_RM_CONFIG_GET: */
