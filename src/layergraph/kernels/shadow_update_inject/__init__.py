"""shadow_update_inject: the update of one layer and the inject of the next, in one."""
