        UVM_ROUTE_CMD_STACK_INIT_CHECK(UVM_TOY,            uvm_api_toy);
