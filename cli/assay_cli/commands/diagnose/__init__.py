"""Commands that look for what is wrong with a server or a checkpoint: probe, lever, locate."""
