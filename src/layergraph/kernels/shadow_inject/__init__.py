"""shadow_inject: the shadow state enters a block's input."""
