    if (arg_cmd == NV_ESC_IOCTL_XFER_CMD)
        case NV_ESC_REGISTER_FD:
        case NV_ESC_CARD_INFO:
