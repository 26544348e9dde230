"""Records of what was found out about a server or a loss: levers, and where two checkpoints part."""
