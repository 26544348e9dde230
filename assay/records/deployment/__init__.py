"""Records of candidates on hardware that only they fit: whether the verdict on them holds there."""
