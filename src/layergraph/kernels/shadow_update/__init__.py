"""shadow_update: a block's output advances the shadow state."""
