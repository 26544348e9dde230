"""Records of what can be known before a run costs anything."""
