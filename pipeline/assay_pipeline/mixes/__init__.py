"""A scheme for every layer and role under a budget: proposed from sensitivities, or chosen in a run (`auto-BUDGET`)."""
