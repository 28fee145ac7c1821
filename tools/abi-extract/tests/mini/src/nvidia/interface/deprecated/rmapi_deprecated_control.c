#define V2_CONVERTER(cmd) NV_CONCATENATE(_ctrl_convert_v2, cmd)
} rmapiDeprecatedControlTable[] = {
    { NV0000_CTRL_CMD_TOY_OLD,    V2_CONVERTER(_NV0000_CTRL_CMD_TOY_OLD)    },
};
static NV_STATUS V2_CONVERTER(_NV0000_CTRL_CMD_TOY_OLD)
(
    void *pArgs
)
{
    CONVERT_TO_V2(NV0000_CTRL_CMD_TOY_OLD_V2,
                  NV0000_CTRL_TOY_OLD_PARAMS,
                  NV0000_CTRL_TOY_OLD_V2_PARAMS,
                  list,
                  list,
                  listSize,
                  NV_TRUE, // a comment, with a comma
                  NV0000_CTRL_TOY_ITEM,
                  NV_TRUE,
                  NV_TRUE
                 );
}
