NV_STATUS embeddedParamCopyIn(RMAPI_PARAM_COPY *paramCopies, RmCtrlParams *pRmCtrlParams)
{
    switch (pRmCtrlParams->cmd)
    {
#ifdef NOT_DEFINED_ANYWHERE
        case NV9999_CTRL_CMD_ABSENT:
            odd_things();
#endif
        case NV0000_CTRL_CMD_TOY_LIST:
        {
            CHECK_PARAMS_OR_RETURN(pRmCtrlParams, NV0000_CTRL_TOY_LIST_PARAMS);
            RMAPI_PARAM_COPY_INIT(paramCopies[0],
                            ((NV0000_CTRL_TOY_LIST_PARAMS*)pParams)->list,
                            ((NV0000_CTRL_TOY_LIST_PARAMS*)pParams)->list,
                            ((NV0000_CTRL_TOY_LIST_PARAMS*)pParams)->count,
                            sizeof(NV0000_CTRL_TOY_ITEM));
            paramCopies[0].flags |= RMAPI_PARAM_COPY_FLAGS_SKIP_COPYIN;
            break;
        }
        default:
            return status;
    }
}
