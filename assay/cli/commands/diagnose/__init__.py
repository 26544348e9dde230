"""Commands that look for what is wrong with a server or a checkpoint: probe and its levers, locate."""
